"""Of prompts the last layer finishes only the rows that are read: of the others it caches keys."""

import dataclasses

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec import target
from specdec.config import GraphConfig, graph_modes
from specdec.rounds.upload import RowStart
from specdec.scheduling.work import PromptPart
from tests.specdec.graph_walk import caches, make_backend, tiny, tiny_runner
from tests.specdec.tiny_pair import random_draft
from tests.weights.tiny import eagle3_config

K = 3
LENGTHS = (9, 5)  # of prompts, beside a request that verifies; of the second a token is left out


@pytest.fixture(autouse=True)
def no_step_is_small(monkeypatch):
    monkeypatch.setattr(target, "SHORT_ROWS", 0)


def runner_of(draft, is_whole=False, backend=None):
    """Eager, or with graphs; is_whole: the target finishes all rows."""
    pair = tiny(None if draft == "taps" else draft, torch.device("cpu"))
    if draft == "taps":  # of streams before the last layer, unlike those of tiny
        shape = {"intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
        config = eagle3_config(pair.target, **shape, aux_boundaries=(0, 1, 1))
        pair = dataclasses.replace(pair, eagle=random_draft(config))
    modes = graph_modes({"target_prefill": "PIECEWISE"})
    config = GraphConfig(request_sizes=(3,), token_sizes=(24,), modes=modes)
    runner = tiny_runner(pair, 0 if draft is None else K, config, backend)
    if is_whole:
        runner.target = dataclasses.replace(runner.target, keeps_hidden=True)
        runner.acts.target = runner.target
    return runner


def part_of(row, length, left_out=0, **changes):
    prompt = [(7 * row + 3 * i) % 96 for i in range(length + left_out)]
    blocks = [2 * row, 2 * row + 1]
    return PromptPart(
        state_row=row, prompt=prompt, start=0, length=length, blocks=blocks, **changes
    )


def run(runner, **changes):
    """A prompt, then a round of it with parts of two others; the results of the second step."""
    num_drafts = runner.sizes.num_speculative_tokens
    for row in range(3):
        start = RowStart(blocks=[2 * row, 2 * row + 1], num_draft_tokens=num_drafts)
        runner.start_rows([(row, start)])
    runner.run_step(parts=[part_of(0, 6)])
    runner.read(1)
    runner.buffers.hidden_states.fill_(torch.nan)
    parts = [part_of(1, LENGTHS[0], **changes), part_of(2, LENGTHS[1], left_out=1)]
    runner.run_step([0], parts, max_num_computed=6)
    return runner.read(3)


def finite_rows(runner):
    """Of the second step."""
    Q = runner.sizes.query_len
    hidden = runner.buffers.hidden_states[: Q + sum(LENGTHS)]
    return hidden.isfinite().all(dim=1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("draft", [None, "taps"])
@pytest.mark.parametrize("backend", ["eager", "tape"])
def test_a_step_with_prompts_finishes_the_rows_that_decide(backend, draft):
    some = runner_of(draft, backend=make_backend(backend)[0])
    whole = runner_of(draft, is_whole=True)
    assert run(some).sampled_tokens == run(whole).sampled_tokens
    Q = some.sizes.query_len
    decided = [*range(Q), Q + LENGTHS[0] - 1, Q + sum(LENGTHS) - 1]
    assert finite_rows(some) == decided
    assert finite_rows(whole) == list(range(Q + sum(LENGTHS)))
    hidden = [runner.buffers.hidden_states[decided] for runner in (some, whole)]
    assert torch.equal(*hidden)
    for ours, theirs in zip(caches(some), caches(whole), strict=True):
        assert torch.equal(ours[:, :, :6].nan_to_num(), theirs[:, :, :6].nan_to_num())
    if draft is not None:
        assert torch.equal(some.state.draft_tokens[:2], whole.state.draft_tokens[:2])
    replays = some.graphs.counters()["target_prefill"].replays
    assert replays[CUDAGraphMode.PIECEWISE] == (2 if backend == "tape" else 0)  # both steps


@pytest.mark.parametrize("backend", ["eager", "tape"])
def test_of_few_rows_all_are_finished(backend, monkeypatch):
    monkeypatch.setattr(target, "SHORT_ROWS", 24)  # of a graph, and more than there are
    runner = runner_of(None, backend=make_backend(backend)[0])
    run(runner)
    assert finite_rows(runner) == list(range(runner.sizes.query_len + sum(LENGTHS)))


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_hidden_states_that_the_draft_reads_are_all_there(draft):
    """Those of EAGLE-1, and of a tap after the last layer."""
    runner = runner_of(draft)
    run(runner)
    assert finite_rows(runner) == list(range(runner.sizes.query_len + sum(LENGTHS)))


def test_hidden_states_of_prompts_with_logprobs_are_all_there():
    runner = runner_of("taps")
    run(runner, num_logprobs=1)
    assert finite_rows(runner) == list(range(runner.sizes.query_len + sum(LENGTHS)))


def test_the_drafts_last_layer_goes_on_for_seeds(monkeypatch):
    num_rows = []
    runner = runner_of("taps")
    mlp = runner.draft.model.layers[0].mlp
    real = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: (num_rows.append(len(x)), real(x))[1])
    run(runner)
    levels = K - 1
    assert num_rows == [1, *[1] * levels, 3, *[3] * levels]
