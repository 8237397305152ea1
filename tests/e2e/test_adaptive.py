"""Rows are shared out and levels vary from round to round: no token depends on it."""

import random
import time
from functools import cache

import numpy as np
import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import LLM, SamplingParams
from specdec.requests.metrics import Counter
from specdec.scheduling.costs import StepCosts
from specdec.scheduling.planner import RoundPlan
from specdec.sizes import BLOCK_SIZE, chain
from specdec.start import load
from tests.shared_rows import at_random, rows_are_shared
from tests.soak import soak

NUM_TOKENS = 16
K = 8
CHEAP = StepCosts(rounds=((512, 1.0),), plain=((64, 1.0),), level=((64, 0.01),))
DEAR = StepCosts(rounds=((8, 1.0), (512, 60.0)), plain=((64, 0.9),), level=((64, 3.0),))
SAMPLED = [
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 0.7, "seed": 2, "presence_penalty": 0.6, "bad_words": ["self"], "logprobs": 2},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "num_speculative_tokens": 2},
    {"temperature": 0.0, "speculate": False},
]


@pytest.fixture(scope="module")
def prompts(prompts):
    """The short ones: 49, 25, 49, 49, 25, 49 tokens, ..."""
    return [prompt for prompt in prompts if len(prompt) < 64]


@pytest.fixture
def make(monkeypatch):
    """make(costs, backend=None, **options): an adaptive engine on a CPU."""

    def build(costs=CHEAP, backend=None, draft="demo", k="auto", **options):
        if backend is not None:
            monkeypatch.setattr(load, "graph_backend", lambda *_: backend)
        with rows_are_shared(costs):
            sizes = {"max_num_seqs": 6, "max_model_len": 320, "device": "cpu"}
            draft = {"model": draft, "num_speculative_tokens": k, "adaptive": True}
            return LLM("demo", draft, **(sizes | options))

    return build


@pytest.fixture(scope="module")
def plain():
    return cache(lambda: LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu"))


@pytest.fixture(scope="module")
def expected(plain, greedy, prompts):
    """Texts of plain decoding: greedy ones, and those of SAMPLED."""
    return [
        texts(plain(), prompts[:6], [greedy(NUM_TOKENS)] * 6),
        texts(plain(), prompts[:5], without_drafts(sampled())),
    ]


def sampled(**more):
    return [SamplingParams(**values, max_tokens=NUM_TOKENS, **more) for values in SAMPLED]


def without_drafts(params):
    return [
        SamplingParams(
            **{k: v for k, v in values.items() if k != "num_speculative_tokens"},
            max_tokens=params[0].max_tokens,
        )
        for values in SAMPLED
    ]


def texts(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.drain()
    return [
        (each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs)
        for each in outputs
    ]


def planned(llm, plans):
    """Make these the plans of the next rounds, the last of them again and again."""
    left = list(plans)

    def plan(coming):
        rows, levels = left.pop(0) if len(left) > 1 else left[0]
        return RoundPlan(max(coming.num_requests, rows), chain(levels))

    llm.engine.planner.plan = plan


@pytest.mark.parametrize(
    "draft, is_async",
    [("demo/eagle3", True), pytest.param("demo/eagle1", False, marks=pytest.mark.slow)],
)
def test_tokens_and_logprobs_are_those_of_plain_decoding(
    make, expected, greedy, prompts, draft, is_async
):
    llm = make(draft=draft, async_scheduling=is_async, max_num_batched_tokens=48)
    at_random(llm, random.Random(1))
    assert texts(llm, prompts[:6], [greedy(NUM_TOKENS)] * 6) == expected[0]
    assert texts(llm, prompts[:5], sampled()) == expected[1]
    planner = llm.engine.planner
    assert (planner.factors != 1).any()
    assert np.array_equal(llm.engine.runner.calibration.numpy(), planner.factors)
    stats = planner.statistics
    assert 0 < stats.num_wasted < stats.num_rows
    assert stats.measured_tokens > 1.2 * stats.num_rounds
    counted = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    assert counted["specdec:round_tokens_measured"] == stats.measured_tokens
    assert counted["specdec:round_tokens_predicted"] == pytest.approx(stats.predicted_tokens, abs=1)


@pytest.mark.parametrize(
    "plans", [pytest.param(None, marks=pytest.mark.slow), [(9, 2), (9, 0)] * 60]
)
def test_guided_texts_are_those_of_plain_decoding(make, plain, greedy, prompts, plans):
    """Masks of rows whose places only the device knows, beside requests without any."""
    rules = [
        {"regex": r"(def|for) [a-z_]{3,9}\([a-z]{0,4}\):( [a-z]+)*"},
        {"json": {"type": "object"}},
    ]
    params = [
        *(
            SamplingParams(temperature=T, seed=5, max_tokens=NUM_TOKENS, structured_outputs=rule)
            for rule in rules
            for T in (0.0, 0.8)
        ),
        greedy(NUM_TOKENS),
        SamplingParams(temperature=0.8, seed=6, max_tokens=NUM_TOKENS),
    ]
    llm = make(async_scheduling=True)
    if plans:  # drafts are dropped in every other round, and may not come back in the next
        planned(llm, plans)
    else:
        at_random(llm, random.Random(4))
    assert texts(llm, prompts[:6], params) == texts(plain(), prompts[:6], params)
    assert llm.engine.planner.statistics.num_wasted > 0, "drafts were verified"


@pytest.mark.parametrize(
    "sizes, token_sizes",
    [([3], [49]), ([1, 3], [16, 49])],
)
@pytest.mark.slow  # test_auto_trees.py has chains among its rounds too
def test_graphs_replay_what_runs_eagerly(make, greedy, prompts, sizes, token_sizes):
    """Padded sizes, shrinking batches; the same rounds, as rows do not depend on padding."""
    found = []
    for backend in (None, TapeBackend()):
        graphs = (
            {"cuda_graph_sizes": sizes, "cuda_graph_token_sizes": token_sizes} if backend else {}
        )
        llm = make(backend=backend, k=2, max_num_seqs=3, max_num_batched_tokens=40, **graphs)
        at_random(llm, random.Random(2), share=1.0)
        lengths = [3, 9, 14, 16]
        outputs = llm.generate(prompts[:4], [greedy(n) for n in lengths], use_tqdm=False)
        outputs += llm.generate(prompts[:5], sampled(), use_tqdm=False)
        found.append([(each.outputs[0].token_ids, each.stats.rounds) for each in outputs])
    assert found[0] == found[1]
    counters = llm.graph_counters()
    of_target = "target_decode", "target_plain", "target_choice"
    for name in (*of_target, "draft_prefill", "draft_decode", "draft_extend"):
        assert counters[name].replays[CUDAGraphMode.FULL] > 0, name
    modes = {kind.mode for counts in counters.values() for kind in counts.batches}
    assert CUDAGraphMode.NONE not in modes


@pytest.mark.slow
def test_prompts_in_steps_that_draft_nothing_run_no_pieces_of_the_draft(
    make, expected, greedy, prompts
):
    """Whose seeds would run its whole layer."""
    llm = make(backend=TapeBackend(), k=2, max_num_seqs=3, max_num_batched_tokens=40)
    planned(llm, [(3, 0)])
    assert texts(llm, prompts[:6], [greedy(NUM_TOKENS)] * 6) == expected[0]
    counters = llm.graph_counters()
    assert counters["target_prefill"].replays[CUDAGraphMode.FULL] > 0
    assert counters["draft_extend"].replays[CUDAGraphMode.FULL] > 0
    assert not counters["draft_prefill"].replays


@pytest.mark.parametrize(
    "draft", ["demo/eagle3", pytest.param("demo/eagle1", marks=pytest.mark.slow)]
)
def test_the_drafts_cache_has_no_holes(make, greedy, prompts, draft):
    """Plain, trimmed and full rounds in turn write what a prefill of the whole text writes."""
    llm, scratch = (make(draft=draft, max_num_seqs=1) for _ in range(2))
    plans = [(1, 0), (1, 3), (2, 8), (9, 0), (1, 0), (1, 0), (1, 2), (3, 1), (2, 5), (4, 0)]
    planned(llm, plans * 6)
    [output] = llm.generate([prompts[0]], greedy(60), use_tqdm=False)
    tokens = prompts[0] + output.outputs[0].token_ids
    scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    rows = [
        each.engine.runner.draft_cache.transpose(3, 4).flatten(2, 3)[:, :, : len(tokens) - 1]
        for each in (llm, scratch)
    ]
    assert torch.equal(*rows)
    assert rows[0].abs().sum() > 0
    assert 0 < output.stats.num_accepted_tokens < output.stats.num_rounds


def test_a_planner_that_says_so_stops_drafts_and_changes_no_token(make, expected, greedy, prompts):
    """Levels after the stop are no drafts: they are neither verified nor counted."""
    params = [greedy(NUM_TOKENS)]
    lengths = {}
    for threshold in (0.0, 0.5, 1.0):
        llm = make(max_num_seqs=1)
        planned(llm, [(9, 8)])
        stop_below = llm.engine.runner.stop_below
        llm.engine.runner.stop_below = lambda _, to=threshold, stop=stop_below: stop(to)
        [output] = llm.generate(prompts[1:2], params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0][1][0]
        lengths[threshold] = [len(each.draft_tokens) for each in output.stats.rounds]
    assert set(lengths[0.0][:-1]) == {8}
    assert set(lengths[1.0]) <= {0, 1}
    assert 1 < np.mean(lengths[0.5]) < 7


@pytest.mark.parametrize("is_async", [True, False])
def test_the_planner_sees_how_long_steps_take_that_follow_without_a_pause(
    make, greedy, prompts, is_async
):
    llm = make(async_scheduling=is_async)
    planner = llm.engine.planner
    seen = []
    planner.observe_time = lambda *given: seen.append(given)
    llm.generate(prompts[:3], greedy(16), use_tqdm=False)
    time.sleep(0.5)
    llm.generate(prompts[:3], greedy(16), use_tqdm=False)
    assert (len(seen) > 4) == is_async
    for size, ms, host_ms in seen:
        assert 0 < size.num_requests <= min(size.num_rows, size.num_keys)
        assert size.num_prompt_rows >= 0 <= size.shape.levels <= 8
        assert 0 < ms < 450  # none of them is the pause
        assert 0 <= host_ms < 450


def test_the_planner_is_told_when_the_next_step_waits_for_it(make, greedy, prompts):
    """Near the end of one of a few requests the host is not ahead of the device."""
    engine = make(max_num_seqs=2, async_scheduling=True).engine
    observe = engine.planner.observe
    seen = []

    def told(outcome, has_time):
        seen.append((has_time, len(engine._in_flight) > 0))
        observe(outcome, has_time)

    engine.planner.observe = told
    engine.add_requests((prompt, greedy(32)) for prompt in prompts[:4])
    while engine.has_unfinished:
        engine.step()
    assert set(seen) == {(True, True), (False, False)}


class Mark:
    """An event of a device that takes 3.25 ms for every step."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Mark") -> float:
        return later.at - self.at


def test_where_the_device_has_a_clock_it_tells_how_long_a_step_takes(
    make, greedy, prompts, monkeypatch
):
    """The host may read a result late, and the next one then at once."""
    llm = make(async_scheduling=True)
    seen = []
    llm.engine.planner.observe_time = lambda _, ms, host_ms: seen.append(ms)
    results = llm.engine.runner.results
    send = results.send

    def marked(*given):
        send(*given)
        results.latest.sent = Mark(3.25 * results._num_sent)

    monkeypatch.setattr(results, "send", marked)
    llm.generate(prompts[:3], greedy(40), use_tqdm=False)
    assert len(seen) > 2
    assert set(seen) == {3.25}


def test_blocks_named_in_plain_rounds_serve_later_drafts(make, greedy, prompts):
    llm, other = make(), make(enable_prefix_caching=False)
    planned(llm, [(1, 0)])
    [output] = llm.generate([prompts[1]], greedy(60), use_tqdm=False)
    assert output.stats.num_drafted_tokens == 0
    follow_up = [*prompts[1], *output.outputs[0].token_ids, 11, 12]
    for each in (llm, other):
        planned(each, [(9, 8)])
    hit, miss = (each.generate([follow_up], greedy(24), use_tqdm=False)[0] for each in (llm, other))
    num_known = len(prompts[1]) + 60 - 1
    assert hit.stats.num_cached_tokens == num_known // BLOCK_SIZE * BLOCK_SIZE > 0
    assert hit.stats.rounds == miss.stats.rounds
    assert hit.stats.num_accepted_tokens > 10


def test_a_request_has_no_more_drafts_than_it_asked_for(make, greedy, prompts):
    llm = make(k=5)
    planned(llm, [(24, 5)])
    own = [0, 1, 3, 5]
    params = [greedy(NUM_TOKENS, num_speculative_tokens=k) for k in own]
    outputs = llm.generate(prompts[:4], params, use_tqdm=False)
    assert [max(each.stats.num_drafted) for each in outputs] == own


def test_rows_for_all_drafts_are_the_rounds_of_a_fixed_number(make, greedy, prompts, demo_llm):
    llm = make(k=3)
    planned(llm, [(24, 3)])
    fixed = demo_llm("demo", 3)
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS)
    for params in (greedy(NUM_TOKENS), drawn):
        ours, theirs = (each.generate(prompts[:3], params, use_tqdm=False) for each in (llm, fixed))
        assert [each.stats.rounds for each in ours] == [each.stats.rounds for each in theirs]


def test_drafts_that_stop_have_no_rows_and_no_probabilities_further_on(
    make, plain, greedy, prompts, monkeypatch
):
    measured = []

    def never_stops(runner, costs):
        measured.append(float(runner.threshold))
        return CHEAP

    with rows_are_shared():
        monkeypatch.setattr(load, "measure_round_costs", never_stops)
        draft = {"model": "demo", "num_speculative_tokens": 5, "draft_confidence_threshold": 0.4}
        llm = LLM("demo", draft, max_num_seqs=6, max_model_len=320, device="cpu")
    assert (measured, float(llm.engine.runner.threshold)) == ([-1.0], pytest.approx(0.4))
    planned(llm, [(36, 5)])
    planner, outcomes = llm.engine.planner, []
    monkeypatch.setattr(planner, "observe", lambda outcome, _: outcomes.append(outcome))
    params = [greedy(16)] * 4
    assert texts(llm, prompts[:4], params) == texts(plain(), prompts[:4], params)
    verified = np.concatenate([each.num_verified for each in outcomes])
    drafted = np.concatenate([(each.probs > 0).sum(axis=1) for each in outcomes])
    room = np.concatenate([each.num_allowed for each in outcomes])
    assert np.array_equal(verified, np.minimum(drafted, room))
    assert set(verified) >= {1, 2, 5}


def test_the_end_of_the_context_is_reached_in_trimmed_rounds(make, plain, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    text = [token for prompt in prompts for token in prompt]
    batch = [text[start : start + length] for start, length in enumerate((300, 311, 318))]
    llm = make()
    at_random(llm, random.Random(5))
    found = texts(llm, batch, params)
    assert found == texts(plain(), batch, params)
    assert [len(tokens) for tokens, *_ in found] == [20, 9, 2]


@pytest.mark.parametrize(
    "costs, drafts",
    [(CHEAP, True), pytest.param(DEAR, False, marks=pytest.mark.slow)],
)
def test_drafts_are_made_where_they_pay(make, greedy, prompts, costs, drafts):
    llm = make(costs)
    [output, *_] = llm.generate(prompts[:4], greedy(60), use_tqdm=False)
    late = output.stats.num_drafted[len(output.stats.num_drafted) // 2 :]
    share = sum(count > 0 for count in late) / len(late)
    assert share > 0.9 if drafts else share < 0.1


def test_requests_that_do_not_speculate_extend_no_cache(make, greedy, prompts):
    llm = make()
    draft = llm.engine.runner.draft
    calls = []
    draft.extend = lambda step: calls.append(step)
    llm.generate(prompts[:2], greedy(NUM_TOKENS, speculate=False), use_tqdm=False)
    assert [bool(step.parts) for step in calls] == [True]
    stats = llm.engine.planner.statistics
    assert (stats.num_rows, stats.num_levels) == (2 * stats.num_rounds, 0)


@pytest.mark.parametrize(
    "backend, count",
    [
        pytest.param("eager", 4, marks=pytest.mark.slow),
        pytest.param("eager", 300, marks=pytest.mark.slow),
        pytest.param("tape", 300, marks=pytest.mark.slow),
        pytest.param("cuda", 60, marks=pytest.mark.gpu),
    ],
)
def test_random_requests_give_what_each_gives_alone(monkeypatch, backend, count):
    if backend == "tape":
        monkeypatch.setattr(load, "graph_backend", lambda *_: TapeBackend())
    device = "cuda" if backend == "cuda" else "cpu"
    result = soak(count, 11, device, is_adaptive=True)
    assert result["faults"] == []
    assert result["mixed_steps"] > count / 10


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_planner_is_told_of_each_round_once_and_beside_the_next(
    make, greedy, prompts, monkeypatch, is_async
):
    llm = make(async_scheduling=is_async)
    planned(llm, [(12, 3)])
    engine, log = llm.engine, []
    run_step, take = engine.runner.run_step, engine._take

    def launch(*args, **kwargs):
        log.append("launch")
        return run_step(*args, **kwargs)

    def taken(step):
        log.append("take" if step.work.verifying else "take prompts")
        return take(step)

    def observe(outcome, has_time):
        log.append("beside" if has_time else "alone")

    monkeypatch.setattr(engine.runner, "run_step", launch)
    monkeypatch.setattr(engine, "_take", taken)
    monkeypatch.setattr(engine.planner, "observe", observe)
    monkeypatch.setattr(engine.planner, "observe_plain", lambda _: log.append("plain"))
    llm.generate(prompts[:2], greedy(80), use_tqdm=False)
    engine.drain()
    told = [name for name in log if name in ("beside", "alone", "plain")]
    assert len(told) == log.count("take") > 8
    # read at once, or as requests end, nothing is left to run beside
    assert told.count("beside") > len(told) / 2 if is_async else "beside" not in told
    for at, name in enumerate(log):
        if name == "beside":  # nothing else came between the launch and this
            assert log[at - 1] == "launch"
