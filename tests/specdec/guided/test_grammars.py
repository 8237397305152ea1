"""What matchers allow, and how bad and costly grammars end."""

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLParserLimits

from specdec.guided import grammars, guides
from specdec.guided.grammars import LIMITS, MAX_CHARS, STACK_BYTES, Grammars
from specdec.guided.guides import Guides
from specdec.requests import json_schemas
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer
from tests.specdec.guided.hostile import BAD, COSTLY
from weights.demo import demo_directory

EOS, OTHER_EOS = 1, 2
VOCAB = 4100  # padded, beyond the tokenizer's 4,096 ids


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(demo_directory("target"))


@pytest.fixture
def compile_(tokenizer):
    """compile_(json=..., ...): a guide."""
    source = Guides(tokenizer, VOCAB, [EOS, OTHER_EOS])
    return lambda **values: source.compile(StructuredOutputsParams(**values))


@pytest.fixture
def processors(monkeypatch):
    """Eight of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


def allowed(mask):
    """The ids of a mask."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_the_text_ends_where_the_grammar_does_with_any_eos_and_nothing_else(compile_, tokenizer):
    guide = compile_(regex="ab+")
    assert not {EOS, OTHER_EOS} & allowed(guide.masks(())[0])
    for letter, is_complete in (("a", False), ("b", True), ("b", True)):
        guide.advance(tokenizer.encode_word(letter))
        assert guide.is_complete == is_complete
    assert {EOS, OTHER_EOS} < allowed(guide.masks(())[0])
    finite = compile_(regex="ab")
    finite.advance(tokenizer.encode_word("ab"))
    assert allowed(finite.masks(())[0]) == {EOS, OTHER_EOS}


def test_padded_ids_are_never_allowed(compile_):
    [mask] = compile_(regex="(?s:.*)").masks(())
    assert len(mask) == 4 * -(-VOCAB // 32)
    assert max(allowed(mask)) < 4096


def test_a_walk_gives_the_masks_that_the_tokens_would_and_leaves_the_guide_where_it_was(
    compile_, tokenizer
):
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    tokens = tokenizer.encode_word('{"a": [1, "b"]}')
    guide = compile_(json=schema)
    for start in range(len(tokens)):
        drafts = tokens[start : start + 4]
        found = guide.masks(drafts)
        assert found == guide.masks(drafts)
        assert len(found) == len(drafts) + 1
        other = guide.copy()
        for i, draft in enumerate(drafts):
            assert other.masks(()) == [found[i]]
            assert draft in allowed(found[i])
            other.advance([draft])
        assert other.masks(()) == [found[-1]]
        guide.advance(tokens[start : start + 1])
    assert guide.is_complete


def test_a_walk_is_cut_at_the_first_illegal_draft_and_at_eos(compile_, tokenizer):
    a, b = tokenizer.encode_word("a")[0], tokenizer.encode_word("b")[0]
    guide = compile_(regex="a*c")
    assert [
        len(guide.masks(drafts)) for drafts in ([a, a], [a, b, a], [b, a], [EOS], [a, EOS])
    ] == [*(3, 2, 1, 1, 2)]
    assert compile_(regex="a*").masks([a, EOS, a]) == compile_(regex="a*").masks([a])


@pytest.mark.parametrize(
    "text",
    ['say "no"', "a\\b", "two\nlines", "caf\xe9 \u6f22", "/x/", "start", "%json", "a\x00\x1f\x7fb"],
)
def test_choices_are_literal(compile_, tokenizer, text):
    guide = compile_(choice=[text, "other"])
    guide.advance(tokenizer.encode_word(text))
    assert guide.is_complete


def test_thousands_of_choices_are_possible_and_one_may_begin_another(compile_, tokenizer):
    choices = [f"option {i}" for i in range(4000)]
    guide = compile_(choice=choices)
    for part in ("option 3", "99", "9"):
        guide.advance(tokenizer.encode_word(part))
        assert (guide.is_complete, guide.error) == (True, "")
    assert allowed(guide.masks(())[0]) == {EOS, OTHER_EOS}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_one_error_with_the_compilers_message(compile_, name):
    values, words = BAD[name]
    with pytest.raises(ValueError, match="structured_outputs: ") as caught:
        compile_(**values)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_grammar_works_or_is_refused_in_bounded_time(compile_, tokenizer, name):
    start = time.monotonic()
    with suppress(ValueError):
        guide = compile_(**COSTLY[name])
        a = tokenizer.encode_word("a")[0]
        while a in allowed(guide.masks([a] * 3)[0]) and time.monotonic() < start + 0.2:
            guide.advance([a])
    assert time.monotonic() - start < 10


def test_the_stack_holds_the_longest_chain_and_later_threads_get_their_own(compile_):
    rules = "start:r0\n"
    count = 0
    while len(rules) < MAX_CHARS - 40:
        rules += f"r{count}:r{count + 1}\n"
        count += 1
    compile_(grammar=f'{rules}r{count}:"a"')
    assert threading.stack_size() != STACK_BYTES


def test_a_limit_met_on_the_way_forbids_all_and_leaves_the_guide_where_it_was(compile_, tokenizer):
    rules = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(1000))
    guide = compile_(grammar=f'start: r0\n{rules}\nr1000: "b"')
    a = tokenizer.encode_word("a")[0]
    first, *rest = guide.masks([a] * 4)
    assert a in allowed(first)
    assert allowed(rest[-1]) == set()
    assert len(rest) < 4
    assert guide.masks(()) == [first]
    guide.advance([a] * len(rest))
    assert allowed(guide.masks(())[0]) == set()
    assert "Current row has" in guide.error
    assert not guide.is_complete


@pytest.fixture
def few_states(monkeypatch):
    """few_states(number): of a lexer."""

    def set_limit(number):
        names = [name for name in dir(LIMITS) if not name.startswith("_")]
        values = {name: getattr(LIMITS, name) for name in names} | {"max_lexer_states": number}
        monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(**values))

    return set_limit


# a lexer's state for each place of an "a" among the last twelve letters
MANY_STATES = "[ab]*a[ab]{12}c"


@pytest.mark.parametrize("first", [0, 2])
def test_texts_of_other_requests_fill_no_lexer(compile_, tokenizer, few_states, first):
    few_states(1000)
    guide = compile_(regex=MANY_STATES)
    letters = [tokenizer.encode_word(letter)[0] for letter in "ab"]
    rng = random.Random(0)
    for number in range(25):
        other = guide.copy()
        text = rng.choices(letters, k=50)
        for place in range(0, len(text), 5):
            drafts = text[place : place + 5]
            masks = other.masks(drafts, first)
            assert len(masks) == 6 - first, (number, place, other.error)
            assert all(allowed(mask) >= set(letters) for mask in masks)
            other.advance(drafts)
        assert not other.error
    assert not guide.copy().error


@pytest.mark.parametrize("first", [0, 2])
def test_a_full_lexer_stops_no_text_that_goes_on(
    compile_, tokenizer, few_states, monkeypatch, first
):
    few_states(1000)
    monkeypatch.setattr(grammars, "most_threads", lambda: 1)  # with a lexer of its own
    guide = compile_(regex=MANY_STATES)
    letters = [tokenizer.encode_word(letter)[0] for letter in "ab"]
    rng = random.Random(0)
    other = guide.copy()
    for _ in range(100):
        filling = guide.copy()
        for token in rng.choices(letters, k=50):
            assert allowed(filling.masks(())[0])
            filling.advance([token])
    other.advance(rng.choices(letters, k=50))
    assert other._matcher.is_error()
    assert len(other.masks(letters * 2, first)) == 5 - first
    assert not other.error


def test_a_text_that_fills_a_lexer_alone_ends_at_the_same_place_after_any_others(
    compile_, tokenizer, few_states
):
    few_states(90)
    guide = compile_(regex=MANY_STATES)
    letters = [tokenizer.encode_word(letter)[0] for letter in "ab"]
    rng = random.Random(0)
    texts = [rng.choices(letters, k=200) for _ in range(3)]

    def end(text):
        other = guide.copy()
        for count, token in enumerate(text):
            if not allowed(other.masks(())[0]):
                assert "too many states" in other.error
                return count
            other.advance([token])
        return None

    ends = [end(text) for text in texts]
    assert None not in ends
    assert [end(text) for text in reversed(texts)] == ends[::-1]


def test_requests_of_one_grammar_walk_at_the_same_time_as_long_as_it_is_quick_to_compile(
    tokenizer, monkeypatch, processors
):
    def num_locks(regex, num_requests):
        source = Guides(tokenizer, VOCAB, [EOS])
        asked = StructuredOutputsParams(regex=regex)
        guides = [source.compile(asked).copy() for _ in range(num_requests)]
        assert len({guide.masks(())[0] for guide in guides}) == 1
        return len({id(guide.lock) for guide in guides})

    monkeypatch.setattr(grammars, "REPEAT_SECONDS", 10.0)
    assert num_locks("[a-z]+", 4) == 4
    assert num_locks("[a-z]+", 20) == 8
    monkeypatch.setattr(grammars, "REPEAT_SECONDS", 0.0)
    assert num_locks("[a-z]+", 4) == 1


def masks_of_parts(guide, drafts, first=0):
    """As of the walk: a part counts if those before it are complete."""
    parts = guide.parts(first, len(drafts) + 1)
    ends = [*(row for row, _ in parts[1:]), len(drafts) + 1]
    found = []
    for (row, part), end in zip(parts, ends, strict=True):
        masks = part.masks(drafts[: end - 1], row)
        if first + len(found) == row:
            found += masks
        else:
            assert masks == []
    return found


def test_parts_of_a_walk_have_its_masks(compile_, tokenizer, monkeypatch, processors):
    monkeypatch.setattr(grammars, "REPEAT_SECONDS", 10.0)
    guide = compile_(regex="(abc|d)*e")
    a, b, c, d = (tokenizer.encode_word(letter)[0] for letter in "abcd")
    guide.advance([d, d])
    walks = [(), [a], [b], [a, b, c, d], [a, c, b, d], [a, b, d, d], [d, d, d, d, d, a], [a, EOS]]
    monkeypatch.setattr(grammars, "SLOW_SECONDS", 10.0)
    guide._compiled.num_slow_masks = 0
    expected = [guide.masks(drafts) for drafts in walks]
    assert len(guide.parts(0, 4)) == 1
    monkeypatch.setattr(grammars, "SLOW_SECONDS", -1.0)
    guide.masks([d])
    assert len({id(part.lock) for _, part in guide.parts(0, 4)}) == 4
    assert [masks_of_parts(guide, drafts) for drafts in walks] == expected
    for first in (1, 2, 3):
        longer = [(drafts, masks[first:]) for drafts, masks in zip(walks, expected, strict=True)]
        for drafts, masks in longer:
            assert len(drafts) < first or masks_of_parts(guide, drafts, first) == masks
    guide.advance([a, b])
    assert masks_of_parts(guide, [c, d, d]) == guide.masks([c, d, d])
    guide.give_up("it is slow")
    assert {allowed(part.masks([c], row)[0]) == set() for row, part in guide.parts(0, 2)} == {True}


def test_parts_of_a_walk_meet_its_limit(tokenizer, monkeypatch, processors):
    monkeypatch.setattr(grammars, "REPEAT_SECONDS", 10.0)
    rules = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(300))
    asked = StructuredOutputsParams(grammar=f'start: r0\n{rules}\nr300: "b"')
    guide = Guides(tokenizer, 4096, [EOS]).compile(asked)
    a = tokenizer.encode_word("a")[0]
    expected = guide.masks([a] * 6)
    assert 1 < len(expected) < 7
    assert allowed(expected[-1]) == set()
    assert {len(mask) for mask in expected} == {4096 // 8}
    monkeypatch.setattr(grammars, "SLOW_SECONDS", -1.0)
    guide.masks([a])
    assert len(guide.parts(0, 7)) == 7
    assert masks_of_parts(guide, [a] * 6) == expected
    assert guide.masks([a] * 6) == expected


def test_a_draft_that_the_library_allows_and_does_not_take_ends_the_text(compile_):
    def fill(pointer, num_bytes, drafts):
        ctypes.memset(pointer, 255, num_bytes)  # the first row alone

    guide = compile_(regex="[a-z]+")
    guide.masks([5, 6])
    guide._rows.fill(255)  # as an earlier walk may leave them
    guide._made = SimpleNamespace(
        is_error=lambda: False, unsafe_compute_mask_ptr_with_draft_token=fill
    )
    assert [len(allowed(mask)) for mask in guide.masks([5, 6])] == [8 * 516, 0]


def test_a_copy_in_the_middle_is_made_by_the_walk_that_needs_it(compile_):
    guide = compile_(regex="[a-z]+")
    [mask] = guide.masks([])
    tokens = sorted(allowed(mask))[:2]
    guide.advance(tokens[:1])
    other = guide.copy()
    assert (guide.copy()._made, other._made) == (None, None)
    other.advance(tokens[1:])
    guide.advance(tokens[1:])
    assert other._made is None
    assert other.masks([]) == guide.masks([]) == other.copy().masks([])
    assert other._made is not None
    assert compile_(regex="[a-z]+")._made is not None  # before the first token: it is soon needed


def test_a_walk_and_those_that_begin_after_it_know_what_it_took(compile_, monkeypatch):
    clock = iter([1.0, 1.5, 2.0, 2.25])
    guide = compile_(regex="[a-z]+x")
    copied = guide.copy()
    monkeypatch.setattr(grammars.time, "thread_time", lambda: next(clock))
    guide.masks(())
    assert guide.walk_seconds == 0.5
    assert (copied.walk_seconds < 0.5, guide.copy().walk_seconds) == (True, 0.5)
    copied.masks(())
    assert (copied.walk_seconds, guide.walk_seconds) == (0.25, 0.5)


def test_compiled_grammars_are_kept_and_the_oldest_is_dropped(tokenizer, monkeypatch):
    monkeypatch.setattr(guides, "NUM_KEPT", 2)
    compiled = []
    real = Grammars.compile
    monkeypatch.setattr(
        Grammars, "compile", lambda self, *source: compiled.append(source) or real(self, *source)
    )
    source = Guides(tokenizer, VOCAB, [EOS])
    for regex in ("a", "b", "a", "c", "a", "b"):
        source.compile(StructuredOutputsParams(regex=regex))
    assert [text for _, text in compiled] == ["a", "b", "c", "b"]


@pytest.mark.parametrize("name", [*sorted(json_schemas.FORMATS), "password"])
def test_a_format_is_held_to_if_and_only_if_the_library_knows_it(compile_, tokenizer, name):
    guide = compile_(json={"type": "string", "format": name})
    text = tokenizer.encode_word('"#"')
    masks = guide.masks(text)
    is_free = len(masks) > len(text) and EOS in allowed(masks[-1])
    assert is_free == (name == "password")


def test_an_endless_schema_is_refused_by_the_name_of_its_parameter(compile_):
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    for given in (schema, json.dumps(schema)):
        with pytest.raises(ValueError, match=r"^structured_outputs: json: the schema refers"):
            compile_(json=given)


def kinds(*schemas):
    return [
        {"type": "object", "properties": {"a": each, "b": {}}, "required": ["a"]}
        for each in schemas
    ]


def test_an_overlapping_one_of_says_what_to_write(compile_):
    overlapping = [{"type": "integer"}, {"type": "number"}]
    words = "may match the same value: write anyOf, or alternatives that cannot, as other"
    with pytest.raises(ValueError, match=words) as error:
        compile_(json={"oneOf": overlapping})
    assert "option" not in str(error.value)
    compile_(json={"anyOf": overlapping})
    compile_(json={"oneOf": [{"type": "integer"}, {"type": "string"}]})
    compile_(json={"oneOf": kinds({"const": "1"}, {"const": "2"})})


def test_without_an_eos_token_structured_output_is_refused(tokenizer):
    with pytest.raises(ValueError, match="structured_outputs needs a target with an EOS token"):
        Guides(tokenizer, VOCAB, []).compile(StructuredOutputsParams(regex="a"))


def test_a_missing_package_is_one_line_with_the_command(tokenizer, monkeypatch):
    monkeypatch.setattr(guides, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs llguidance: pip install "specdec\[guided\]"$'):
        Guides(tokenizer, VOCAB, [EOS]).compile(StructuredOutputsParams(regex="a"))


@pytest.mark.slow
def test_llguidance_is_imported_for_the_first_grammar_only():
    code = (
        "import sys; from specdec import LLM, SamplingParams\n"
        "llm = LLM('demo', max_num_seqs=1, max_model_len=64, device='cpu')\n"
        "llm.generate('a', SamplingParams(max_tokens=1), use_tqdm=False)\n"
        "before = 'llguidance' in sys.modules\n"
        "llm.generate('a', SamplingParams(structured_outputs={'choice': ['b']}), use_tqdm=False)\n"
        "print(before, 'llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(
    "values, words",
    [
        ({}, "none given"),
        ({"regex": "a", "json": {}}, "json and regex given"),
        ({"json": 5}, "give a JSON schema"),
        ({"json": {"a": {1, 2}}}, "no JSON schema"),
        ({"json": {"a": float("nan")}}, "no JSON schema"),
        ({"regex": ""}, "give text"),
        ({"grammar": 7}, "give text"),
        ({"choice": "yes"}, "a list of non-empty strings"),
        ({"choice": []}, "a list of non-empty strings"),
        ({"choice": ["a", ""]}, "a list of non-empty strings"),
        ({"choice": ["a", "\udc00b"]}, "text without halves of surrogate pairs"),
        ({"json_object": False}, "give True"),
        ({"jsn": {}}, "did you mean json"),
    ],
)
def test_values_are_checked_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        StructuredOutputsParams(**values).source()


def test_a_schema_may_be_text_and_any_object_is_a_schema(compile_):
    schema = {"type": "boolean"}
    masks = compile_(json=schema).masks(())
    assert masks == compile_(json=json.dumps(schema)).masks(())
    assert grammars.FORMATS.keys() == {"json", "regex", "lark"}
    assert compile_(json_object=True).masks(()) == compile_(json={"type": "object"}).masks(())
