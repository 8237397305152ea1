"""The bundled pair in graphs: the same tokens and accepted counts as eager, round for round."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from graphs.cuda import CudaBackend
from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec.config import GraphConfig, graph_modes
from specdec.requests.params import SamplingParams
from specdec.requests.request import whole_output
from specdec.requests.tokenizer import Tokenizer
from specdec.rounds.step_sizes import Proposal
from specdec.runner import Runner
from specdec.sizes import EngineSizes
from specdec.start.load import assemble
from weights.demo import demo_directory
from weights.load import load_eagle, load_target

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
NUM_TOKENS = 10
BACKENDS = ["tape", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = [
    pytest.param("eagle3", 0, marks=pytest.mark.slow),
    ("eagle3", 3),
    pytest.param("eagle3", 5, marks=pytest.mark.slow),
    pytest.param("eagle3", 7, marks=pytest.mark.slow),
    pytest.param("eagle1", 3, marks=pytest.mark.slow),  # walks of both: test_runner_graphs.py
]


@pytest.fixture(scope="module")
def prompts(prompts):
    """Short ones, of 25 and 49 tokens, and one of 97."""
    return prompts[1:6]


@pytest.fixture(scope="module")
def references(references):
    """Of these prompts."""
    return references[1:6]


@pytest.fixture(scope="module")
def pair():
    """pair(device, draft): the loaded pair, in float32."""
    known = {}

    def load(device, draft):
        if device not in known:
            known[device] = load_target(
                demo_directory("target"), dtype=torch.float32, device=device, progress=False
            )
        key = device, draft
        if key not in known:
            known[key] = load_eagle(
                demo_directory(draft), known[device], device=device, progress=False
            )
        return known[device], known[key]

    return load


def build(
    pair,
    draft,
    k,
    backend,
    max_model_len=192,
    is_eager=False,
    max_num_seqs=4,
    max_num_batched_tokens=48,
    **config,
):
    """An engine with a cache for all of its rows, and its graphs captured."""
    device = torch.device("cpu" if backend == "tape" else "cuda")
    captures = None if is_eager else TapeBackend() if backend == "tape" else CudaBackend(device)
    target, eagle = pair(device, draft)
    sizes = EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=3 * max_num_seqs,
        num_speculative_tokens=k,
    )
    graphs = GraphConfig(**{"request_sizes": (2, 4), "token_sizes": (48,), **config})
    runner = Runner(target, eagle, sizes, device, graph_config=graphs, backend=captures)
    runner.capture()
    config = replace(target.config, eos_token_ids=())
    return assemble(runner, config, Tokenizer(demo_directory("target")), is_async=False)


@pytest.fixture(scope="module")
def engine_of(pair):
    """engine_of(draft, k, backend): an engine of 4 rows and chunks of 48, captured once."""
    return cache(lambda draft, k, backend: build(pair, draft, k, backend))


def run(engine, requests):
    """Outputs, and what the graphs counted."""
    for counter in engine.runner.graphs.counters().values():
        counter.forget_batches()
    added = engine.add_requests(requests)
    while engine.has_unfinished:
        engine.step()
    return [whole_output(request) for request in added], engine.runner.graphs.counters()


def rounds(outputs):
    return [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft, k", SETTINGS)
def test_graphs_change_no_token_and_no_accepted_count(
    pair, engine_of, greedy, prompts, references, backend, draft, k
):
    requests = [(prompt, greedy(NUM_TOKENS - i)) for i, prompt in enumerate(prompts[:5])]
    captured, counters = run(engine_of(draft, k, backend), requests)
    eager, _ = run(build(pair, draft, k, backend, is_eager=True), requests)
    assert rounds(captured) == rounds(eager)
    assert [o.outputs[0].token_ids for o in captured] == [
        r[: NUM_TOKENS - i] for i, r in enumerate(references[:5])
    ]
    assert counters["target_decode"].replays.keys() == {FULL}
    assert counters["target_prefill"].replays.keys() == {FULL}
    families = {"target_prefill", "target_decode", "target_choice"}
    families |= {"draft_prefill", "draft_decode", "target_plain"} if k else set()
    assert {name for name in counters if not name.endswith("_sampled")} == families


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices_are_a_graph_where_a_graph_ran_and_nobody_asks_for_logits(
    engine_of, greedy, prompts, backend
):
    engine = engine_of("eagle3", 3, backend)
    asked = {"temperature": 0.8, "seed": 1}, {"logprobs": 1}, {"presence_penalty": 0.1}
    for values in ({}, *asked):
        params = replace(greedy(6), **values)
        _, counters = run(engine, [(prompt, params) for prompt in prompts[:2]])
        assert counters["target_decode"].replays[FULL] > 0
        replays = counters["target_decode"].replays + counters["target_plain"].replays
        assert counters["target_choice"].replays == (Counter() if values else replays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_drafts_prefill_after_rounds_in_pieces_changes_nothing(
    pair, engine_of, greedy, prompts, backend
):
    requests = [(prompt, greedy(NUM_TOKENS)) for prompt in prompts[:3]]
    whole, by_whole = run(engine_of("eagle3", 3, backend), requests)
    modes = graph_modes({"draft_prefill": "PIECEWISE", "target_prefill": "PIECEWISE"})
    engine = build(pair, "eagle3", 3, backend, modes=modes, request_sizes=(4,))
    pieces, by_pieces = run(engine, requests)
    assert rounds(pieces) == rounds(whole)
    num_rounds = by_whole["target_decode"].replays[FULL]
    num_chunks = by_whole["target_prefill"].replays[FULL]
    assert by_pieces["target_prefill"].replays == {PIECEWISE: num_chunks}
    num_chunks -= 1  # after one no prompt has ended: the draft's KV is extended op by op
    assert by_whole["draft_prefill"].replays == {FULL: num_rounds, PIECEWISE: num_chunks}
    assert by_pieces["draft_prefill"].replays == {PIECEWISE: num_rounds + num_chunks}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_without_drafts_have_graphs_of_their_own(engine_of, greedy, prompts, backend):
    values = [{}, {"frequency_penalty": 0.5}]
    requests = [
        (prompt, greedy(8, speculate=False, **more))
        for prompt, more in zip(prompts, values, strict=False)
    ]
    captured, counters = run(engine_of("eagle3", 3, backend), requests)
    plain, _ = run(
        engine_of("eagle3", 0, backend),
        [(prompt, greedy(8, **more)) for prompt, more in zip(prompts, values, strict=False)],
    )
    assert [output.outputs[0].token_ids for output in captured] == [
        output.outputs[0].token_ids for output in plain
    ]
    assert counters["target_plain"].replays.keys() == {FULL}
    assert not counters["target_decode"].replays


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_fills_the_context_to_its_end_in_graphs(
    pair, greedy, prompts, references, backend
):
    limit = len(prompts[0]) + 30
    engine = build(
        pair, "eagle3", 5, backend, limit, max_num_seqs=1, request_sizes=(1,), token_sizes=(48,)
    )
    [output], counters = run(engine, [(prompts[0], greedy(1000))])
    assert output.outputs[0].token_ids == references[0][:30]
    assert counters["target_decode"].replays.keys() == {FULL}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "draft, k", [pytest.param("eagle3", 0, marks=pytest.mark.slow), ("eagle3", 3)]
)
def test_sampled_rounds_in_graphs_change_no_token_and_no_accepted_count(
    pair, engine_of, greedy, prompts, replayed, backend, draft, k
):
    sampled = {"temperature": 0.9, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = [
        SamplingParams(seed=1, top_p=0.9, **sampled),
        greedy(NUM_TOKENS - 5),
        SamplingParams(seed=2, repetition_penalty=1.3, **sampled),
        greedy(NUM_TOKENS, frequency_penalty=0.5),
        SamplingParams(seed=3, top_k=9, logprobs=2, **sampled),
    ]
    requests = list(zip(prompts[:5], params, strict=True))
    captured, counters = run(engine_of(draft, k, backend), requests)
    eager, _ = run(build(pair, draft, k, backend, is_eager=True), requests)
    assert rounds(captured) == rounds(eager)
    assert counters["target_decode"].replays.keys() == {FULL}
    if k:
        drawn = Proposal(is_drawn=True, is_wide=False)
        assert drawn in {desc.kind for of, desc in replayed if of == "draft_prefill"}
        assert drawn in {desc.kind for of, desc in replayed if of == "draft_decode"}
        assert counters["draft_prefill"].replays[FULL] == counters["target_decode"].replays[FULL]
        assert counters["draft_decode"].replays.keys() == {FULL}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_loop_of_16_every_step_that_fits_replays_a_graph(
    pair, greedy, prompts, monkeypatch, backend
):
    engine = build(
        pair,
        "eagle3",
        3,
        backend,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        request_sizes=(8, 16),
        token_sizes=(64, 112),
    )
    engine.scheduler.prompts.budget = (
        None  # which a GPU has, by measured costs; then no step is too large
    )
    runner = engine.runner
    real = runner.run_step
    steps = []

    def run_step(rows, parts, **options):
        steps.append((len(rows) * options["shape"].rows, sum(part.length for part in parts)))
        return real(rows, parts, **options)

    monkeypatch.setattr(runner, "run_step", run_step)
    coming = [(prompts[i % 5], greedy(5 + i % 5)) for i in range(22)]
    added = engine.add_requests(coming[:16])
    while engine.has_unfinished:
        engine.step()
        num_ended = sum(request.finish is not None for request in added)
        added += engine.add_requests(coming[len(added) : 16 + num_ended])

    with_prompts = [verified + prompt for verified, prompt in steps if prompt]
    num_fitting = sum(rows <= 112 for rows in with_prompts)
    num_mixed = sum(verified > 0 for verified, prompt in steps if prompt)
    assert min(num_mixed, num_fitting, len(with_prompts) - num_fitting) > 2
    counters = runner.graphs.counters()
    for family in ("target_prefill", "draft_prefill"):
        mode = FULL if family == "target_prefill" else PIECEWISE
        assert counters[family].replays[mode] == num_fitting
        assert counters[family].dispatches[NONE] == len(with_prompts) - num_fitting
    num_rounds = len(steps) - len(with_prompts)
    assert counters["target_prefill"].dispatches.keys() == {FULL, NONE}
    assert counters["target_decode"].replays == {FULL: num_rounds}
    assert counters["target_decode"].dispatches == {FULL: num_rounds}
    assert counters["draft_prefill"].replays[FULL] == num_rounds
    assert counters["draft_decode"].dispatches.keys() == {FULL}
