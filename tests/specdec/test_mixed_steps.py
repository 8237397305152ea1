"""A step with verify slots and prompts equals the two steps that it replaces, to the bit."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from graphs.modes import CUDAGraphMode
from specdec.config import GraphConfig
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.query_rows import QueryRows
from specdec.passes import contexts
from specdec.requests.params import EVERYTHING, GREEDY, SamplingFlags, SamplingStart
from specdec.rounds.results import StepResult
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import IDLE, PLAIN, DraftShape, chain
from tests.specdec.graph_walk import (
    caches,
    make_backend,
    poison,
    prompt_of,
    tiny,
    tiny_runner,
)

BACKENDS = ["eager", "tape", pytest.param("cuda", marks=pytest.mark.gpu)]
GRAPHS = GraphConfig(request_sizes=(2, 5), token_sizes=(16, 48))
NUM_ROWS = 10
RUNNING = [0, 1, 2, 3, 4]
RESUMED = 8
FLAGS = {
    "greedy": GREEDY,
    "drawn": SamplingFlags(noise=True, floor=True),
    "everything": EVERYTHING._replace(logprobs=2),
}
DRAWN = {"temperature": 0.9, "top_p": 0.9}
RULES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {7: 2.0},
    "bad_words": [(word, (5 * word + 1) % 96) for word in range(40)],
}
VALUES = {"greedy": {}, "drawn": DRAWN, "everything": DRAWN | RULES}
STATE = ("last_sampled_tokens", "num_computed_tokens")
PROPOSED = ("draft_tokens", "draft_scores")
COUNTED = ("output_counts", "history")


def part(row: int, start: int, length: int) -> PromptPart:
    """Of a prompt of 3 to 11 tokens; the last three of RESUMED's have been generated."""
    is_resumed = row == RESUMED
    return PromptPart(
        state_row=row,
        prompt=prompt_of(row),
        start=start,
        length=length,
        blocks=[2 * row, 2 * row + 1],
        num_logprobs=None if is_resumed else 2,
        is_resumed=is_resumed,
    )


# from 42 rows down to 7: parts that end, go on, and end after that; then no prompt
MIXTURES = [
    (RUNNING, [part(5, 0, 8), part(RESUMED, 0, 10), part(7, 0, 4)]),
    ([0, 2, 5], [part(7, 4, 3)]),
    ([RESUMED], [part(7, 7, 3)]),
    ([7, 1], [part(9, 0, 3), part(6, 0, 2)]),
    ([9, 3, 5, RESUMED, 0], []),
]


def row_start(row: int, k: int, name: str) -> RowStart:
    prompt = prompt_of(row)
    generated = prompt[8:10] if row == RESUMED else []
    sampling = SamplingStart(
        prompt=prompt[:8] if row == RESUMED else prompt, seed=row, **VALUES[name]
    )
    return RowStart(
        blocks=[2 * row, 2 * row + 1],
        num_draft_tokens=k,
        min_position=len(prompt) + 2,
        stop_ids=range(0, 96, 3),
        sampling=sampling,
        generated=generated,
    )


@pytest.fixture(scope="module")
def make():
    """make(backend, draft, k, acceptance): a runner, captured once; (..., device): on a device."""
    known = {}

    def build(backend, draft, k, acceptance, device=None):
        key = backend, draft, k, acceptance, device
        if key not in known:
            captures, own_device = make_backend(backend)
            pair = tiny(draft, device or own_device)
            known[key] = tiny_runner(pair, k, GRAPHS, captures, acceptance)
        return known[key]

    return build


def begin(runner: Runner, k: int, name: str) -> None:
    """Five requests whose prompts are computed, and a round; the others have their rows."""
    for cache in caches(runner):
        cache[:, :, :-1] = torch.nan
    runner.state.sampling.history.zero_()
    for row in range(NUM_ROWS):
        runner.start_rows([(row, row_start(row, k, name))])
    flags = FLAGS[name]
    runner.run_step(parts=[part(row, 0, len(prompt_of(row))) for row in RUNNING], flags=flags)
    runner.run_step(RUNNING, max_num_computed=20, flags=flags)


@dataclass(frozen=True)
class Seen:
    """A step's results, and what the target left for its rows."""

    result: StepResult
    features: list[Tensor]


def run(
    runner: Runner,
    rows: list[int],
    parts: list[PromptPart],
    flags: SamplingFlags,
    shape: DraftShape,
) -> Seen:
    shapes = {"shape": shape, "next_shape": IDLE if shape == PLAIN and not parts else None}
    runner.run_step(rows, parts, max_num_computed=60, flags=flags, **shapes)
    num_rows = len(rows) * shape.rows + sum(each.length for each in parts)
    buffers = runner.buffers.hidden_states, runner.buffers.aux_hidden_states
    result = runner.read(len(rows) + len(parts))
    return Seen(result, [buffer[:num_rows].clone() for buffer in buffers])


def assert_joins(found: Seen, verified: Seen, prompts: Seen | None, parts: list[PromptPart]):
    """Row by row, for all that verify and for the prompts that end."""
    V = len(verified.result.num_accepted)
    Q = len(verified.features[0]) // V
    apart = [verified] if prompts is None else [verified, prompts]
    for i, features in enumerate(found.features):
        assert torch.equal(features, torch.cat([each.features[i] for each in apart]))
    assert found.result.num_accepted[:V] == verified.result.num_accepted
    assert found.result.draft_tokens[:V] == verified.result.draft_tokens
    tokens = [row[:Q] for row in found.result.sampled_tokens[:V]]
    assert tokens == [row[:Q] for row in verified.result.sampled_tokens]
    ends = [b for b, each in enumerate(parts) if each.ends_prompt]
    for b in ends:
        first = found.result.sampled_tokens[V + b][0]
        assert first == prompts.result.sampled_tokens[b][0]
        assert first == parts[b].prompt[-1] or not parts[b].is_resumed
    decided = [*range(V * Q), *(V * Q + b for b in ends)]
    if found.result.logprobs is not None:
        for ours, *theirs in zip(*(each.result.logprobs for each in (found, *apart)), strict=True):
            assert torch.equal(ours[decided], torch.cat(theirs)[decided])
    for b, each in enumerate(parts):
        if each.num_logprobs is not None:
            pairs = (one.result.prompt_logprobs[b] for one in (found, prompts))
            assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def assert_same_cache(i: int, runners: tuple[Runner, Runner], rows: set[int]) -> None:
    """i: 0 for the target's, 1 for the draft's. rows: of the state."""
    blocks = [block for row in sorted(rows) for block in (2 * row, 2 * row + 1)]
    ours, theirs = (caches(each)[i][:, :, blocks].nan_to_num(9e9) for each in runners)
    assert torch.equal(ours, theirs)


def assert_same_rows(places: tuple[object, object], names: tuple[str, ...], rows: set[int]) -> None:
    """Of two states, the tensors of these names."""
    for name in names:
        ours, theirs = (getattr(each, name)[sorted(rows)] for each in places)
        assert torch.equal(ours, theirs), name


def assert_all_are_counted(state: RequestState, rows: list[int]) -> None:
    """Every generated token, the last one included, which is not yet computed."""
    num_tokens = state.num_computed_tokens[rows] + 1
    counted = state.sampling.output_counts[rows].sum(dim=1)
    assert torch.equal(counted, num_tokens - state.sampling.num_prompt_tokens[rows])


def texts_of(plain: Runner, name: str) -> list[list[int]]:
    """Every row's prompt and what plain decoding adds to it."""
    rows = list(range(NUM_ROWS))
    texts = [prompt_of(row) for row in rows]
    for row in rows:
        plain.start_rows([(row, row_start(row, 0, name))])
    parts = [part(row, 0, len(texts[row]) - (row == RESUMED)) for row in rows]
    plain.run_step(parts=parts, flags=FLAGS[name])
    for row, tokens in enumerate(plain.read(NUM_ROWS).sampled_tokens):
        texts[row] += tokens if row != RESUMED else []
    for _ in range(20):
        plain.run_step(rows, max_num_computed=60, flags=FLAGS[name])
        for row, tokens in enumerate(plain.read(NUM_ROWS).sampled_tokens):
            texts[row] += tokens
    return texts


def give_drafts(runner: Runner, rows: list[int], texts: list[list[int]]) -> None:
    """To every other request, drafts that hold."""
    for row in rows[::2]:
        first = int(runner.state.num_computed_tokens[row]) + 1
        held = torch.tensor(texts[row][first:][: runner.sizes.num_speculative_tokens])
        runner.state.draft_tokens[row] = held.to(runner.device)


def walk(
    mixed: Runner,
    apart: Runner,
    k: int,
    name: str,
    query_len: int,
    texts: list[list[int]] | None = None,
) -> None:
    """Every mixture, with poison before it, against a round and a step of prompts.

    texts: of every row, for drafts that hold
    """
    for runner in (mixed, apart):
        begin(runner, k, name)
    both = mixed, apart
    how = FLAGS[name], chain(query_len - 1)
    # a round of which nothing is drafted leaves the draft alone; with prompts it does not
    drafts_apart = query_len == k + 1
    verified = set()
    started = set(RUNNING)
    for rows, parts in MIXTURES:
        if texts is not None:
            for runner in (mixed, apart):
                give_drafts(runner, rows, texts)
        expected = run(apart, rows, [], *how)
        prompts = run(apart, [], parts, *how) if parts else None
        poison(mixed)
        found = run(mixed, rows, parts, *how)
        assert_joins(found, expected, prompts, parts)
        if texts is not None:
            held = found.result.num_accepted[: len(rows)][::2]
            assert held == [query_len - 1] * len(held)
        verified |= set(rows)
        started |= {each.state_row for each in parts if each.ends_prompt}
        everything = set(range(NUM_ROWS))
        assert_same_cache(0, both, everything)
        if k:
            assert_same_cache(1, both, everything if drafts_apart else everything - verified)
        states = mixed.state, apart.state
        assert_same_rows(states, (*STATE, *PROPOSED) if drafts_apart else STATE, started)
        if FLAGS[name].bad_words:
            assert_same_rows((mixed.state.sampling, apart.state.sampling), COUNTED, started)
            assert_all_are_counted(mixed.state, sorted(started))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    "draft, k, query_len",
    [
        ("eagle3", 3, 4),
        ("eagle3", 3, 1),
        pytest.param("eagle1", 1, 2, marks=pytest.mark.slow),
        (None, 0, 1),
    ],
)
def test_a_mixed_step_equals_the_two_that_it_replaces(make, backend, name, draft, k, query_len):
    mixed = make(backend, draft, k, "exact")
    apart = make("eager", draft, k, "exact", mixed.device)
    replays = mixed.graphs.target.prefill.counters.replays
    before = replays[CUDAGraphMode.FULL]
    plain = make("eager", None, 0, "exact", mixed.device)
    walk(mixed, apart, k, name, query_len, texts_of(plain, name))
    num_steps = 5 if backend != "eager" else 0  # the one of `begin`, and four mixtures
    assert replays[CUDAGraphMode.FULL] - before == num_steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["drawn", "everything"])
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_a_mixed_step_draws_what_the_two_draw_that_it_replaces(make, backend, name, rule):
    mixed = make(backend, "eagle3", 3, rule)
    walk(mixed, make("eager", "eagle3", 3, rule, mixed.device), 3, name, 4)


def test_kernels_prepared_for_a_rounds_rows_serve_its_like(monkeypatch):
    """Those of prompts are each step's own: their grids differ."""
    runner = tiny_runner(tiny("eagle3", torch.device("cpu")), 3, GRAPHS)

    def launches(rows, num_computed, num_drafts=3):
        """Of the rows that verify, of prompts, and of the draft's seeds."""
        parts = [part(7, 0, 4)]
        round = Round(state_rows=rows, shape=chain(num_drafts), next_shape=chain(3), parts=parts)
        step = runner.step_of(round, num_computed)
        of_target = runner.target.contexts.rows(step, step.passes.target)
        assert step.passes.draft_prefill is not None
        of_draft = runner.draft.contexts.rows_and_seeds(step, step.passes.draft_prefill, 4)
        groups = (*of_target.attn_metadata.groups, *of_draft.attn_metadata.finished)
        return [group.launches for group in groups]

    verified, prompts, seeds = launches([0, 1, 2], 20)
    assert verified is not seeds
    again, others, seeds_again = launches([3, 4, 0], 50)
    assert again is verified
    assert seeds_again is seeds
    assert others is not prompts
    for changes in ([0, 1], 20), ([0, 1, 2], 20, 0), ([0, 1, 2], 62):  # 66 keys are in two splits
        assert launches(*changes)[0] is not verified
    monkeypatch.setattr(contexts, "MOST_KEPT", 1)
    launches([0, 1, 2, 3], 20)  # new, so that all are dropped
    assert launches([0, 1, 2], 20)[0] is not verified


def test_rows_prepare_kernels_for_each_kind_of_layer():
    """Heads of another shape, as a layer of another kind has, or as many more of them."""
    rows = QueryRows(
        block_table=torch.zeros(2, 1, dtype=torch.int64),
        idx_mapping=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        max_seq_len=8,
    )
    out = {}
    for G, C in ((1, 16), (2, 16), (1, 32), (1, 16)):
        q, cache = torch.ones(1, 2, C), torch.zeros(2, 2, G, 64, C)
        cache[1, :, :] = C + G
        out[G, C] = torch.full_like(q, torch.nan)
        launch_paged_attention(q, out[G, C], cache, rows)
        assert (out[G, C] == C + G).all()
    assert len(rows.launches) == 3


def test_other_rows_prepare_kernels_of_their_own():
    """A copy with changes, as tests and benchmarks make them."""
    rows = QueryRows(
        block_table=torch.zeros(2, 1, dtype=torch.int64),
        idx_mapping=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(3, dtype=torch.int64),
        max_seq_len=8,
    )
    kept = rows.with_launches({})
    assert kept.launches is not rows.launches
    assert replace(kept, max_seq_len=9).launches is not kept.launches
