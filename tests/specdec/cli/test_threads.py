"""The number of threads: measured, obeyed where it is given, and without effect on any token."""

import asyncio
import os
import time

import pytest
import torch

import specdec.cli.threads as threads
from specdec import LLM, AsyncLLM, SamplingParams
from specdec.cli.threads import choose_threads, fastest, median_seconds, steps_of

DRAFT = {"model": "demo", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", DRAFT, device="cpu", max_num_seqs=2, max_model_len=256)


@pytest.mark.parametrize(
    "milliseconds, best",
    [
        ({1: (4, 8), 2: (2, 4), 4: (1, 2)}, 4),
        ({1: (4, 8), 2: (2, 4), 4: (1.9, 2)}, 2),  # not clearly faster
        ({1: (4, 8), 2: (3.7, 4), 4: (3.5, 4)}, 4),  # than 1, the best until then
        ({1: (4, 8), 2: (2, 9), 4: (1, 8)}, 1),  # in a whole round they wait for each other
    ],
)
def test_more_threads_must_be_clearly_faster_in_every_step(monkeypatch, milliseconds, best):
    monkeypatch.setattr(threads, "median_seconds", lambda step, count, _: milliseconds[count][step])
    assert fastest([0, 1], [1, 2, 4]) == best


def test_a_round_is_not_timed_where_a_product_is_slower(monkeypatch):
    timed = []
    seconds = {("product", 1): 1, ("product", 2): 1, ("round", 1): 5}

    def look_up(step: str, count: int, _: float) -> int:
        timed.append((step, count))
        return seconds[step, count]

    monkeypatch.setattr(threads, "median_seconds", look_up)
    assert fastest(["product", "round"], [1, 2]) == 1
    assert timed == [("product", 1), ("round", 1), ("product", 2)]


def test_a_step_is_timed_with_this_many_threads_and_not_for_long():
    counts = []

    def step() -> None:
        counts.append(torch.get_num_threads())
        time.sleep(0.001)

    assert median_seconds(step, 3, 0.02) >= 0.001
    assert set(counts) == {3}
    assert 1 <= len(counts) <= 20
    counts.clear()
    median_seconds(step, 3, 0)
    assert len(counts) == 1


def test_the_choice_is_set_and_told(llm, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    counts = []
    monkeypatch.setattr(threads, "fastest", lambda steps, given: counts.append(given) or 2)
    choose_threads(llm.engine.runner)

    assert counts == [[1, 2, 4, 6]]
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == "threads: 2 of 6 cores (OMP_NUM_THREADS sets them)\n"


def test_omp_num_threads_is_obeyed(llm, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "fastest", lambda *_: pytest.fail("measured"))
    choose_threads(llm.engine.runner)
    assert capsys.readouterr().err == ""


def test_measuring_changes_no_token_and_no_count(llm):
    params = SamplingParams(seed=4, max_tokens=12)
    expected = llm.generate("def f(", params, use_tqdm=False)[0]
    fastest(steps_of(llm.engine.runner), [1])
    output = llm.generate("def f(", params, use_tqdm=False)[0]

    assert output.outputs == expected.outputs
    assert int(output.request_id) == int(expected.request_id) + 1
    assert output.stats.num_rounds == expected.stats.num_rounds


def test_of_a_large_model_only_a_part_of_a_product_is_timed(llm, monkeypatch):
    steps = steps_of(llm.engine.runner)
    monkeypatch.setattr(threads, "MOST_BYTES", 0)
    monkeypatch.setattr(threads, "SLICE_BYTES", 1 << 14)
    [product] = steps_of(llm.engine.runner)

    assert len(steps) == 2
    assert product().nbytes < steps[0]().nbytes


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_tokens_are_equal_for_any_number_of_threads(llm, prompts, temperature):
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=16)
    texts = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        outputs = llm.generate(prompts[0], params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])

    assert texts[0] == texts[1] == texts[2]


def test_the_thread_of_an_async_engine_has_the_same_number(monkeypatch):
    async def last(engine: AsyncLLM) -> None:
        async for _ in engine.generate("def f(", SamplingParams(max_tokens=2)):
            pass

    with AsyncLLM("demo", device="cpu", max_num_seqs=1, max_model_len=64) as engine:
        counts = []
        real = engine.llm.engine.runner.run_step
        monkeypatch.setattr(
            engine.llm.engine.runner,
            "run_step",
            lambda *args, **options: (
                counts.append(torch.get_num_threads()) or real(*args, **options)
            ),
        )
        fastest(steps_of(engine.llm.engine.runner), [1])
        torch.set_num_threads(3)
        counts.clear()
        asyncio.run(last(engine))

    assert set(counts) == {3}
