"""An engine that makes no progress is told from one that is idle, computes or compiles."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec import AsyncLLM, SamplingParams
from specdec.kernels import COMPILING, NO_GPU
from specdec.serve import async_engine
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess
from specdec.serve.engine_thread import EngineSilentError
from tests.specdec.serve.test_engine_process import start

ROOT = Path(__file__).parents[3]
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with AsyncLLM("demo", device="cpu", max_num_seqs=4, max_model_len=64) as found:
        yield found


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(async_engine, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(async_engine, "LOOK_SECONDS", 0.05)


async def write(llm):
    return [output async for output in llm.generate("a", SHORT)][-1]


@contextmanager
def stepping(llm, act):
    """In the next step the engine calls `act(may_go_on)` first."""
    engine, may_go_on = llm.llm.engine, threading.Event()
    step = engine.step

    def acting():
        engine.step = step
        act(may_go_on)
        return step()

    engine.step = acting
    try:
        yield may_go_on
    finally:
        may_go_on.set()
        engine.step = step


def compute(may_go_on):
    while not may_go_on.is_set():
        sum(range(1000))


def compile_(may_go_on):
    COMPILING.add(threading.get_ident())
    may_go_on.wait()
    COMPILING.discard(threading.get_ident())


def test_an_idle_engine_is_well(llm):
    asyncio.run(write(llm))
    time.sleep(0.5)
    assert llm.is_well
    assert llm._thread.silent_seconds == 0


def test_an_engine_that_is_stuck_is_asked_nothing_until_it_goes_on(llm):
    async def run():
        with stepping(llm, threading.Event.wait) as may_go_on:
            writing = asyncio.create_task(write(llm))
            await asyncio.sleep(0.1)
            assert llm.is_well
            began = time.monotonic()
            for ask in (llm.get_metrics, llm.graph_counters, lambda: llm.abort("x")):
                with pytest.raises(EngineSilentError, match="has made no progress or given"):
                    await ask()
            with pytest.raises(EngineSilentError):
                await write(llm)
            assert time.monotonic() - began < 5
            assert not llm.is_well
            assert llm.is_running
            may_go_on.set()
            assert (await writing).finished
        assert llm.is_well
        assert await llm.get_metrics()

    asyncio.run(run())


@pytest.mark.parametrize("act", [compute, compile_])
def test_a_step_that_computes_or_compiles_for_long_is_progress(llm, act):
    async def run():
        with stepping(llm, act) as may_go_on:
            writing = asyncio.create_task(write(llm))
            for _ in range(5):
                await asyncio.sleep(0.1)
                assert llm.is_well
            may_go_on.set()
            assert (await writing).finished
        assert llm.is_well

    asyncio.run(run())


def test_what_uses_a_processor_beside_a_gpu_may_only_wait(llm, monkeypatch):
    monkeypatch.setattr(
        llm.llm.engine, "runner", SimpleNamespace(device=SimpleNamespace(type=""), followers=None)
    )

    async def run():
        with stepping(llm, compute) as may_go_on:
            writing = asyncio.create_task(write(llm))
            await asyncio.sleep(0.5)
            assert not llm.is_well
            monkeypatch.undo()
            may_go_on.set()
            await writing

    asyncio.run(run())


def test_running_requests_end_when_the_engine_is_silent_for_long(llm, monkeypatch):
    monkeypatch.setattr(async_engine, "LOST_SECONDS", 0.6)

    async def run():
        with stepping(llm, threading.Event.wait):
            async with asyncio.timeout(10):
                with pytest.raises(EngineSilentError):
                    await write(llm)
        await asyncio.sleep(0.1)
        return await write(llm)

    assert asyncio.run(run()).finished


def test_an_answer_has_a_limit_of_time_even_if_the_engine_goes_on(llm, monkeypatch):
    monkeypatch.setattr(async_engine, "ANSWER_SECONDS", 0.3)

    async def run():
        with stepping(llm, compute):
            writing = asyncio.create_task(write(llm))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                with pytest.raises(EngineSilentError):
                    await llm.get_metrics()
        await writing

    asyncio.run(run())


@pytest.mark.slow
def test_a_stopped_process_is_silent_until_it_goes_on(monkeypatch):
    monkeypatch.setattr(async_engine, "SILENT_SECONDS", 3.0)
    with AsyncEngine(EngineProcess(start(draft=None))) as llm:
        asyncio.run(write(llm))
        pid = llm._host._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(EngineSilentError):
                asyncio.run(llm.get_metrics())
            assert time.monotonic() - began < 20
            assert not llm.is_well
        finally:
            os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + 20
        while not llm.is_well:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert asyncio.run(write(llm)).finished


@pytest.mark.slow
def test_a_thread_that_compiles_a_kernel_is_known_to():
    program = """if True:
        from threading import get_ident
        from specdec import kernels
        seen = []
        def compiler(source, **options):
            seen.append(set(kernels.COMPILING))
            if source == "bad":
                raise ValueError
        kernels._compile(compiler, "good")
        try:
            kernels._compile(compiler, "bad")
        except ValueError:
            pass
        assert seen == [{get_ident()}] * 2, seen
        assert not kernels.COMPILING
    """
    env = {**os.environ, NO_GPU: "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, cwd=ROOT)
