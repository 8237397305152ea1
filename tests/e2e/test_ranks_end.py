"""However an engine of two ranks ends, nothing of it is left, and whoever waits is told."""

import asyncio
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from specdec import LLM, AsyncLLM, EngineDeadError, SamplingParams
from specdec.parallel import begin
from specdec.parallel.processes import RankError
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess, EngineStart
from specdec.start import runners
from tests.ranks import marked_processes, shared_memory

OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "tensor_parallel_size": 2}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
URL = r"serving .* at (http://\S+)/v1"
SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from specdec import LLM, SamplingParams
endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
print("begins", flush=True)
options = {"max_num_seqs": 4, "max_model_len": 256, "tensor_parallel_size": 2}
with LLM("demo", {"model": "demo"}, device="cpu", **options) as llm:
    print("loaded", flush=True)
    while True:
        llm.generate(["a", "b", "c"], endless, use_tqdm=False)
"""


@pytest.fixture
def mark(monkeypatch):
    """A word in the environment of all processes that the test starts."""
    word = f"mark-{uuid.uuid4().hex}"
    monkeypatch.setenv("SPECDEC_TEST_MARK", word)
    return word


def nothing_is_left(mark, seconds=15.0):
    ends_at = time.monotonic() + seconds
    while left := marked_processes(mark):
        assert time.monotonic() < ends_at, f"processes {left} are left"
        time.sleep(0.05)


def interrupt(mark, number, after, seconds):
    """Send a signal to a script of two ranks, so many seconds after it says a word."""
    before = shared_memory()
    command = [sys.executable, "-c", SCRIPT]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while script.stdout.readline().strip() != after:
        assert script.poll() is None, script.stderr.read()
    time.sleep(seconds)
    script.send_signal(number)
    _, said = script.communicate(timeout=15)
    nothing_is_left(mark)
    assert shared_memory() == before
    assert script.returncode != 0
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, after, seconds",
    [
        ("SIGINT", "loaded", 0.4),
        ("SIGINT", "begins", 0.9),
        ("SIGTERM", "loaded", 0.2),
    ],
)
def test_a_signal_ends_all_ranks(mark, name, after, seconds):
    said = interrupt(mark, getattr(signal, name), after, seconds)
    assert ("KeyboardInterrupt" in said) == (name == "SIGINT")


@pytest.mark.slow
@pytest.mark.parametrize("i", range(10))
def test_ctrl_c_at_any_moment_leaves_nothing(mark, i):
    interrupt(mark, signal.SIGINT, "begins", random.uniform(0.0, 5.0))


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_the_start(monkeypatch):
    real = begin._start

    def elsewhere(*given):
        start = real(*given)
        return replace(start, found=start.found._replace(target=start.found.target / "none"))

    monkeypatch.setattr(begin, "_start", elsewhere)
    with pytest.raises(RankError, match=r"(?s)^rank 1 ended with.*CheckpointError"):
        LLM("demo", **OPTIONS)


def test_what_all_ranks_refuse_is_said_once(mark, capfd, monkeypatch):
    """Rank 0 is the last one to find it."""
    real = runners._num_blocks
    monkeypatch.setattr(runners, "_num_blocks", lambda *given: time.sleep(0.5) or real(*given))
    with pytest.raises(ValueError, match=r"^num_kv_blocks=1000000000 take .* give fewer"):
        LLM("demo", **OPTIONS, num_kv_blocks=10**9)
    assert "rank 1:" not in capfd.readouterr().err
    nothing_is_left(mark)


@pytest.mark.slow
def test_an_idle_async_engine_learns_of_a_ranks_end(mark):
    llm = AsyncLLM("demo", **OPTIONS)
    [rank] = set(marked_processes(mark)) - {os.getpid()}

    async def run():
        outputs = llm.generate("a", SamplingParams(max_tokens=2))
        assert [output.finished async for output in outputs][-1]
        os.kill(rank, signal.SIGKILL)
        ends_at = time.monotonic() + 5
        while llm.is_running:
            assert time.monotonic() < ends_at, "it does not notice"
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
            await anext(llm.generate("a"))

    asyncio.run(run())
    nothing_is_left(mark)


def nothing(*_):
    """Say that it is loaded."""


@pytest.mark.slow
def test_a_served_engine_ends_with_its_rank(mark):
    start = EngineStart(
        model="demo",
        speculative_config={"model": "demo"},
        options=OPTIONS,
        set_up=nothing,
        loaded=nothing,
    )
    with AsyncEngine(EngineProcess(start)) as llm:
        engine = llm._host._process
        [rank] = set(marked_processes(mark)) - {os.getpid(), engine.pid}

        async def run():
            outputs = llm.generate("a", ENDLESS)
            await anext(outputs)
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
                async for _ in outputs:
                    pass

        asyncio.run(run())
        assert engine.wait(15) == 1
    nothing_is_left(mark)


def run_for(llm, seconds):
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        llm.generate("a", ENDLESS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_ends_within_15_seconds_of_its_rank(mark, number):
    llm = LLM("demo", **OPTIONS)
    [rank] = set(marked_processes(mark)) - {os.getpid()}
    os.kill(rank, number)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 (was ended by SIGKILL|has given no sign of life)"):
        run_for(llm, seconds=30)
    assert time.monotonic() < began + 15
    nothing_is_left(mark)


@pytest.mark.slow
def test_a_server_whose_rank_was_killed_says_so_and_ends_with_1(mark):
    before = shared_memory()
    words = [sys.executable, "-m", "specdec", "serve", "demo", "--port", "0", "--device", "cpu"]
    with subprocess.Popen([*words, "-tp", "2"], stderr=subprocess.PIPE, text=True) as server:
        url = next(found[1] for line in server.stderr if (found := re.search(URL, line)))
        [rank] = [each for each in marked_processes(mark) if is_rank(each)]
        assert httpx2.get(f"{url}/health").status_code == 200
        os.kill(rank, signal.SIGKILL)
        ends_at = time.monotonic() + 15
        while httpx2.get(f"{url}/health").status_code == 200 and time.monotonic() < ends_at:
            time.sleep(0.01)
        found = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert found.status_code == 503
        assert "rank 1 was ended by SIGKILL" in found.json()["error"]["message"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 1
    nothing_is_left(mark)
    assert shared_memory() == before


def is_rank(process):
    return "specdec.parallel.worker" in Path(f"/proc/{process}/cmdline").read_text()


@pytest.mark.slow
def test_a_command_whose_rank_was_killed_says_so_in_a_line(mark):
    words = [sys.executable, "-m", "specdec", "generate", "demo", "a", "--device", "cpu"]
    words += ["--max-tokens", "1000", "--ignore-eos", "-tp", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as command:
        command.stdout.read(1)
        [rank] = [each for each in marked_processes(mark) if is_rank(each)]
        os.kill(rank, signal.SIGKILL)
        _, said = command.communicate(timeout=15)
    assert command.returncode == 1
    assert said.decode().splitlines()[-1] == "specdec: error: rank 1 was ended by SIGKILL"


@pytest.mark.slow
def test_shutdown_and_collection_end_ranks(mark):
    for end in (LLM.shutdown, lambda _: None):
        llm = LLM("demo", **OPTIONS)
        assert len(marked_processes(mark)) == 1
        end(llm)
        del llm
        gc.collect()
        nothing_is_left(mark)
