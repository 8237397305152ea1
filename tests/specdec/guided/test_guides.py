"""How many grammars are kept, by their number and by what the heap has grown by."""

import subprocess
import sys
from pathlib import Path

import pytest

from specdec.guided import guides
from specdec.guided.guides import KEPT_BYTES, MOST_BYTES, Guides, resident_bytes
from specdec.requests.structured_outputs import GrammarsBusyError, StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer
from weights.demo import demo_directory

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(demo_directory("target"))


@pytest.fixture
def source(tokenizer):
    return Guides(tokenizer, 4096, [1])


@pytest.fixture
def allocated(monkeypatch):
    """allocated[0]: bytes of the heap."""
    found = [5 << 30]  # an engine has more than a grammar
    monkeypatch.setattr(guides, "resident_bytes", lambda: found[0])
    return found


def regex(number):
    return StructuredOutputsParams(regex=f"a{{{number}}}")


def kept(source):
    return [int(text[2:-1]) for _, text in source._compiled]


def test_a_heap_that_grows_drops_what_is_kept_and_no_running_request(source, allocated):
    running = source.compile(regex(1))
    expected = running.masks(())
    for number in (2, 3):
        allocated[0] += KEPT_BYTES // 2
        source.compile(regex(number))
    assert kept(source) == [1, 2, 3]
    allocated[0] += 1
    source.compile(regex(4))
    assert kept(source) == []
    assert running.masks(()) == source.compile(regex(1)).masks(()) == expected
    allocated[0] += KEPT_BYTES  # counted from the drop on
    source.compile(regex(2))
    assert kept(source) == [1, 2]


def test_what_others_give_back_is_not_counted_for_the_grammars(source, allocated):
    source.compile(regex(1))
    allocated[0] -= 1 << 30
    source.compile(regex(2))
    allocated[0] += KEPT_BYTES + 1
    source.compile(regex(3))
    assert kept(source) == []


def test_servers_take_no_new_grammar_while_those_of_requests_have_many_bytes(source, allocated):
    running = [source.compile(regex(number)) for number in range(1, guides.FEW + 1)]
    allocated[0] += MOST_BYTES + (1 << 20)
    source.check(regex(20))  # as many may be
    running.append(source.compile(regex(30)))
    with pytest.raises(GrammarsBusyError, match="9 grammars of requests have up to 1025 MiB"):
        source.check(regex(40))
    source.compile(regex(40))  # as LLM.generate does
    running.clear()
    source.check(regex(50))


def test_a_large_block_is_seen_and_seen_to_go():
    before = resident_bytes()
    block = bytearray(b"1") * (1 << 26)
    assert 0.9 * len(block) < resident_bytes() - before < 1.5 * len(block)
    del block
    guides.give_back()
    assert resident_bytes() - before < 1 << 25


MEASURE = """if True:
    import os, random, time
    import numpy as np
    from specdec.guided.guides import Guides
    from specdec.requests.structured_outputs import StructuredOutputsParams as Params
    from specdec.requests.tokenizer import Tokenizer
    from weights.demo import demo_directory

    source = Guides(Tokenizer(demo_directory("target")), 4096, [1])
    source.compile(Params(regex="a"))

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    def walk(guide, seconds):
        rng, end = random.Random(0), time.thread_time() + seconds
        while time.thread_time() < end:
            each = guide.copy()
            for _ in range(100):
                [mask] = each.masks(())
                if each.error or not any(mask) or time.thread_time() > end:
                    break
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                each.advance([int(rng.choice(np.flatnonzero(bits)))])

    before = largest = resident()
    for number in range(64):
        guide = source.compile(Params(regex=REGEX(number)))
        walk(guide, SECONDS)
        del guide
        largest = max(largest, resident())
    print(largest - before)
"""
LARGE = {
    "when compiled": ("lambda n: '|'.join(f'(a{n}{i}.*){{3}}' for i in range(5000))", 0.0),
    "once used": ("lambda n: f'(.*a.{{{200 + n}}}b)+'", 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_64_hostile_grammars_take_bounded_memory(name, capsys):
    regex, seconds = LARGE[name]
    program = f"REGEX, SECONDS = {regex}, {seconds}\n{MEASURE}"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    with capsys.disabled():
        print(f"\n64 grammars that are large {name}: {found.stdout.strip()} MiB more")
    assert int(found.stdout) < 2 * (KEPT_BYTES >> 20)
