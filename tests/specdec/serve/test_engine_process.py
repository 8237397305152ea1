"""An engine in another process gives what one in a thread gives; each learns of the other's end."""

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from specdec import LLM, EngineDeadError, SamplingParams
from specdec.requests.stats import FIGURES
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess, EngineStart
from weights import CheckpointError

OPTIONS = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 256}
PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def", "# a comment\n"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, stop=["\n\n", "return"], logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=14, repetition_penalty=1.2, detokenize=False),
    SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": ["yes", "no"]}),
]
# each kind of parameters and each prompt, and all of both
FEW_JOBS = [(PROMPTS[i % 4], PARAMS[i % 5]) for i in range(8)]
JOBS = [(prompt, params) for params in PARAMS for prompt in PROMPTS]


def nothing(*_):
    """Set up, or say that it is loaded."""


def start(model="demo", draft="demo", loaded=nothing, **options):
    return EngineStart(
        model=model,
        speculative_config=None if draft is None else {"model": draft},
        options={**OPTIONS, **options},
        set_up=nothing,
        loaded=loaded,
    )


def write_num_frozen(file, _):
    file.write_text(str(gc.get_freeze_count()))


@pytest.fixture(scope="module")
def num_frozen(tmp_path_factory):
    """Where the process writes how many objects no collection walks over, once it is loaded."""
    return tmp_path_factory.mktemp("served") / "num_frozen"


@pytest.fixture(scope="module")
def served(num_frozen):
    with AsyncEngine(EngineProcess(start(loaded=partial(write_num_frozen, num_frozen)))) as llm:
        yield llm


def test_no_collection_walks_over_what_was_there_when_the_engine_was_loaded(served, num_frozen):
    assert int(num_frozen.read_text()) > 50_000


async def outputs_of(llm, prompt, params, **how):
    return [output async for output in llm.generate(prompt, params, **how)]


def told(output):
    """All of an output but its name and its times."""
    figures = {name: getattr(output.stats, name) for name in (*FIGURES, "rounds")}
    counts = output.stats.num_prompt_tokens, output.stats.num_generated_tokens
    rest = output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs
    return figures, counts, rest, output.seed, output.finished


@pytest.mark.parametrize(
    "jobs", [FEW_JOBS, pytest.param(JOBS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_outputs_are_those_of_an_llm(served, jobs):
    llm = LLM("demo", {"model": "demo"}, **OPTIONS)
    expected = llm.generate(
        [prompt for prompt, _ in jobs], [params for _, params in jobs], use_tqdm=False
    )

    async def run():
        return await asyncio.gather(*(outputs_of(served, *job) for job in jobs))

    found = asyncio.run(run())
    assert [told(outputs[-1]) for outputs in found] == [told(output) for output in expected]
    for outputs in found:
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            pairs = zip(before.outputs, after.outputs, strict=True)
            assert all(b.text.startswith(a.text) for a, b in pairs)
        times = outputs[-1].stats
        assert times.arrival_time < times.first_token_time <= times.last_token_time
    assert max(len(outputs) for outputs in found) > 5
    assert any(output.stats.num_accepted_tokens for outputs in found for output in outputs)


def test_requests_are_refused_and_ended_by_name(served):
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def run():
        running = asyncio.create_task(outputs_of(served, "a", endless, request_id="one"))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="'one' is already running"):
            await outputs_of(served, "b", endless, request_id="one")
        with pytest.raises(ValueError, match="max_model_len"):
            await outputs_of(served, "b" * 2000, endless)
        with pytest.raises(ValueError, match="regex"):
            await served.check_grammar(SamplingParams(structured_outputs={"regex": "("}))
        assert await served.abort("one")
        assert not await served.abort("another")
        ended = await running
        left = served.generate("c", endless)
        async for _ in left:
            break
        await left.aclose()  # a client that leaves
        return ended

    ended = asyncio.run(run())
    assert ended[-1].outputs[0].finish_reason == "abort"
    assert _num_running(served) == 0
    assert served.is_running


def test_who_leaves_before_an_answer_leaves_nothing_behind(served):
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def run():
        for name in ("a", "b", "a", "b"):  # a name may come again
            leaving = asyncio.create_task(outputs_of(served, "c", endless, request_id=name))
            await asyncio.sleep(0)  # its request is on its way, and not answered
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        left = served.generate("d", endless, request_id="a")
        await anext(left)
        await left.aclose()
        again = await outputs_of(served, "d", SamplingParams(max_tokens=3), request_id="a")
        with pytest.raises(TypeError, match="pickle"):
            await outputs_of(served, {"prompt": "e", "prompt_token_ids": (i for i in [1])}, endless)
        return again[-1].outputs[0].token_ids

    assert len(asyncio.run(run())) == 3
    assert _num_running(served) == 0
    assert not served._host._calls
    assert not served._mailboxes._by_id


def _num_running(llm):
    """When what was aborted has ended."""

    async def run():
        await asyncio.sleep(0.2)
        metrics = {each.name: each for each in await llm.get_metrics()}
        return metrics["specdec:num_requests_running"].value

    return asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_engine_leaves_signals_to_the_server(served, number):
    os.kill(served._host._process.pid, number)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    assert asyncio.run(outputs_of(served, "a", params))[-1].finished


def test_counters_and_facts_come_over(served):
    async def run():
        await outputs_of(served, "a", SamplingParams(max_tokens=4))
        return await served.get_metrics()

    found = asyncio.run(run())
    steps = {each.labels["family"]: each.value for each in found if each.name == "specdec:steps"}
    assert steps["target_decode"] > 0
    [late] = [each for each in found if each.name == "specdec:compilations_after_start"]
    assert late.value == 0
    assert served.facts.max_num_seqs == 8
    assert served.facts.tokenizer.is_dir()


@pytest.mark.parametrize("is_running", [pytest.param(False, marks=pytest.mark.slow), True])
def test_requests_learn_that_the_process_has_ended(is_running):
    llm = AsyncEngine(EngineProcess(start(draft=None)))
    process = llm._host._process
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def run():
        outputs = llm.generate("a", endless)
        if is_running:
            await anext(outputs)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="status -9"):
            async for _ in outputs:
                pass

    asyncio.run(run())
    assert not llm.is_running
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="status -9"):
        asyncio.run(llm.get_metrics())


@pytest.mark.slow
def test_a_request_that_comes_as_the_engine_ends_learns_of_it(monkeypatch):
    with AsyncEngine(EngineProcess(start(draft=None))) as llm:
        process = llm._host
        ask = process.ask

        def late(*given, **how):
            process._process.kill()
            process._reader.join()  # all that was known has ended, this request too
            return ask(*given, **how)

        monkeypatch.setattr(process, "ask", late)
        with pytest.raises(EngineDeadError, match="status -9"):
            asyncio.run(outputs_of(llm, "a", SamplingParams(max_tokens=3)))


def fail(llm):
    """From the third step on."""
    step, count = llm.engine.step, [0]

    def failing():
        count[0] += 1
        if count[0] > 2:
            raise RuntimeError("planted")
        return step()

    llm.engine.step = failing


def test_a_step_that_fails_ends_the_process_and_says_why(capfd):
    with AsyncEngine(EngineProcess(start(draft=None, loaded=fail))) as llm:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        with pytest.raises(EngineDeadError, match="RuntimeError: planted"):
            asyncio.run(outputs_of(llm, "a", params))
        assert not llm.is_running
    assert "planted" in capfd.readouterr().err  # the traceback


@pytest.mark.slow
def test_what_loading_raises_is_raised_here(tmp_path):
    with pytest.raises(CheckpointError, match="nothing loaded"):
        AsyncEngine(EngineProcess(start(str(tmp_path))))


@pytest.mark.slow
def test_options_that_are_refused_are_refused_here():
    with pytest.raises(ValueError, match="max_num_seqs"):
        AsyncEngine(EngineProcess(start(max_num_seqs=0)))


def test_a_process_that_ends_while_it_loads_is_an_error_here():
    with pytest.raises(ChildProcessError, match="status 7 while it loaded"):
        AsyncEngine(EngineProcess(start(loaded=partial(leave, 7))))


def leave(status, _):
    os._exit(status)


def say_and_wait(llm):
    """While it still loads."""
    print(os.getpid(), flush=True)
    time.sleep(60)


@pytest.mark.parametrize(
    "loaded", [pytest.param("nothing", marks=pytest.mark.slow), "say_and_wait"]
)
def test_the_engine_ends_with_the_process_that_started_it(loaded):
    program = f"""if True:
        import sys, time
        from tests.specdec.serve import test_engine_process as test
        llm = test.AsyncEngine(test.EngineProcess(test.start(draft=None, loaded=test.{loaded})))
        print(llm._host._process.pid, flush=True)
        time.sleep(60)
    """
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=root) as server:
        engine = int(server.stdout.readline())
        os.kill(engine, 0)  # it is there
        server.kill()
    assert _has_ended(engine, 20)


def _has_ended(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True  # nobody is left to wait for it
        time.sleep(0.05)
    return False
