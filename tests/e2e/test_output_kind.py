"""An output is whole, what is new, or the last one, as output_kind says; the text is the same."""

import asyncio
import itertools
from contextlib import aclosing

import pytest

from specdec import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from specdec.requests.stats import FIGURES
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_process import EngineProcess, EngineStart

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
DRAFT = {"model": "demo", "num_speculative_tokens": 3}
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 320}
PROMPT = "def fibonacci(n):"
PARAMS = [
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 3, "n": 3, "logprobs": 1},
    {"temperature": 1.0, "seed": 5, "n": 2, "stop": ["\n\n", "return"]},
    {"temperature": 0.0, "detokenize": False},
]


def nothing(*_):
    """Set up, or say that it is loaded."""


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request):
    """An engine for asyncio, in a thread or in a process of its own."""
    start = EngineStart(
        model="demo", speculative_config=DRAFT, options=OPTIONS, set_up=nothing, loaded=nothing
    )
    with (
        AsyncEngine(EngineProcess(start))
        if request.param == "process"
        else AsyncLLM("demo", DRAFT, **OPTIONS) as made
    ):
        yield made


@pytest.fixture(scope="module")
def alone():
    """An engine without an event loop."""
    with LLM("demo", DRAFT, **OPTIONS) as made:
        yield made


def sampling(kind, **given):
    return SamplingParams(**{"max_tokens": 16, **given}, output_kind=kind)


async def outputs_of(llm, params, pause=0.0, **how):
    found = []
    async with aclosing(llm.generate(PROMPT, params, **how)) as outputs:
        async for output in outputs:
            found.append(output)
            await asyncio.sleep(pause)
    return found


def joined(outputs):
    """The whole that deltas add up to."""
    whole = outputs[0].copy()
    for output in outputs[1:]:
        whole.add(output)
    return whole


def told(output):
    """All of an output but its name and its times."""
    figures = {name: getattr(output.stats, name) for name in (*FIGURES, "rounds")}
    rest = output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs
    counts = output.stats.num_prompt_tokens, output.stats.num_generated_tokens
    return figures, counts, rest, output.seed, output.finished


@pytest.mark.parametrize(
    "given, pause",
    [
        *((given, 0.0) for given in PARAMS[:2]),
        (PARAMS[0], 0.03),
        *(pytest.param(given, 0.0, marks=pytest.mark.slow) for given in PARAMS[2:]),
        *(pytest.param(given, 0.03, marks=pytest.mark.slow) for given in PARAMS[1:]),
    ],
)
def test_each_kind_gives_the_output_of_generate(llm, alone, given, pause):
    [expected] = alone.generate(PROMPT, sampling(CUMULATIVE, **given), use_tqdm=False)

    async def run():
        return [await outputs_of(llm, sampling(each, **given), pause) for each in RequestOutputKind]

    whole, deltas, final = asyncio.run(run())
    assert told(whole[-1]) == told(joined(deltas)) == told(expected)
    assert [told(each) for each in final] == [told(expected)]
    assert [each.finished for each in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 2


@pytest.mark.parametrize("given", PARAMS)
def test_a_delta_has_only_what_is_new_and_a_whole_grows(llm, given):
    async def run():
        return [await outputs_of(llm, sampling(each, **given)) for each in (DELTA, CUMULATIVE)]

    deltas, wholes = asyncio.run(run())
    for i in range(given.get("n", 1)):
        pieces = [each for output in deltas for each in output.outputs if each.index == i]
        whole = next(each for each in wholes[-1].outputs if each.index == i)
        assert "".join(each.text for each in pieces) == whole.text
        assert [token for each in pieces for token in each.token_ids] == whole.token_ids
        assert all(each.finish_reason is None for each in pieces[:-1])
        assert pieces[-1].finish_reason == whole.finish_reason
        assert pieces[-1].cumulative_logprob == whole.cumulative_logprob
        rounds = [record for each in pieces for record in each.stats.rounds]
        assert rounds == whole.stats.rounds
    assert {each.prompt for each in deltas} == {PROMPT}
    assert all(each.prompt_token_ids == wholes[-1].prompt_token_ids for each in deltas)
    assert [each.prompt_logprobs for each in deltas[1:]] == [None] * (len(deltas) - 1)
    for before, after in itertools.pairwise(wholes):
        assert [each.index for each in after.outputs] == list(range(given.get("n", 1)))
        pairs = list(zip(before.outputs, after.outputs, strict=True))
        assert all(b.text.startswith(a.text) for a, b in pairs)
        assert all(b.token_ids[: len(a.token_ids)] == a.token_ids for a, b in pairs)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_abort_ends_each_kind_with_what_there_is(llm, kind):
    params = sampling(kind, temperature=0.9, n=2, seed=1, max_tokens=250, ignore_eos=True)

    async def run():
        reading = asyncio.create_task(outputs_of(llm, params, request_id="one"))
        other = sampling(CUMULATIVE, temperature=0.0, max_tokens=16, ignore_eos=True)
        await outputs_of(llm, other)
        assert await llm.abort("one")
        return await reading

    outputs = asyncio.run(run())
    whole = joined(outputs) if kind is DELTA else outputs[-1]
    assert whole.finished
    assert {each.finish_reason for each in whole.outputs} == {"abort"}
    assert sum(len(each.token_ids) for each in whole.outputs) == whole.stats.num_generated_tokens
    assert len(outputs) == 1 if kind is FINAL_ONLY else len(outputs) > 2


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_error_of_the_engine_reaches_readers_of_each_kind(kind, monkeypatch):
    with AsyncLLM("demo", DRAFT, **OPTIONS) as llm:
        step, count = llm.llm.engine.step, itertools.count()

        def failing():
            if next(count) > 4:
                raise RuntimeError("planted")
            return step()

        monkeypatch.setattr(llm.llm.engine, "step", failing)
        found = []

        async def run():
            async for output in llm.generate(PROMPT, sampling(kind, ignore_eos=True)):
                found.append(output)

        with pytest.raises(EngineDeadError, match="planted"):
            asyncio.run(run())
    assert not any(each.finished for each in found)


@pytest.mark.parametrize(
    "kind",
    [
        RequestOutputKind.DELTA,
        pytest.param(RequestOutputKind.CUMULATIVE, marks=pytest.mark.slow),
        pytest.param(RequestOutputKind.FINAL_ONLY, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("given", PARAMS[1:2])
def test_generate_gives_wholes_and_a_stream_gives_pieces(alone, kind, given):
    [expected] = alone.generate(PROMPT, sampling(CUMULATIVE, **given), use_tqdm=False)
    [output] = alone.generate(PROMPT, sampling(kind, **given), use_tqdm=False)
    assert told(output) == told(expected)
    pieces = list(alone.stream(PROMPT, sampling(kind, **given)))
    for whole in expected.outputs:
        own = [piece for piece in pieces if piece.index == whole.index]
        assert "".join(piece.text for piece in own) == whole.text
        assert [piece.finish_reason is not None for piece in own] == [False] * (len(own) - 1) + [
            True
        ]
        assert (len(own) == 1) == (kind is FINAL_ONLY)


@pytest.mark.parametrize("given", ["delta", 1, None])
def test_what_is_no_kind_is_refused(given):
    with pytest.raises(ValueError, match=f"output_kind={given!r}: give a RequestOutputKind"):
        SamplingParams(output_kind=given)
