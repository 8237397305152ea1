"""Steps that are measured for a target with experts have rows that choose different ones."""

import dataclasses

import pytest
import torch

from specdec.models import experts
from specdec.runner import Runner
from specdec.sizes import PLAIN, EngineSizes, TreeShape, chain
from specdec.start import step_times
from specdec.start.compile_ahead import prompts, round_of
from specdec.start.measure_costs import NEVER, _keys, measure_costs, measure_round_costs
from specdec.start.spread import context, spread
from tests.specdec.graph_walk import tiny
from tests.specdec.start.test_measure_costs import HostMark

E, CHOSEN = 12, 3
CPU = torch.device("cpu")
TREE = TreeShape(num_levels=3, top_k=2, num_nodes=5)
WAYS = {"plain": (0, False, None), "fixed": (2, False, None), "auto": (3, True, TREE)}


@pytest.fixture
def runner_of():
    """runner_of(way, draft): an engine of 4 requests that has measured nothing."""

    def build(way, draft="eagle3, experts"):
        k, is_adaptive, tree = WAYS[way]
        sizes = EngineSizes(
            max_model_len=160,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_kv_blocks=12,
            num_speculative_tokens=k,
            is_adaptive=is_adaptive,
            tree=tree,
        )
        pair = tiny(draft, CPU)
        eagle = pair.eagle if k else None
        return Runner(pair.target, eagle, sizes, CPU, confidence_threshold=None if tree else 0.0)

    return build


@pytest.fixture
def chosen(monkeypatch):
    """The ids [T, k] of each forward."""
    found = []
    real = experts.route

    def route(*args):
        routing = real(*args)
        found.append(routing.ids_TS.clone())
        return routing

    monkeypatch.setattr(experts, "route", route)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_of_measured_steps_choose_experts_and_not_the_same(
    monkeypatch, runner_of, chosen, way
):
    monkeypatch.setattr(step_times, "mark", HostMark)
    runner = runner_of(way)
    with runner.stopping_below(NEVER):
        steps = measure_costs(runner)
        if way == "auto":
            costs = measure_round_costs(runner, steps)
            assert [n for n, _ in costs.plain] == [1, 2, 3, 4]
    for ids in chosen:
        num_hit = len(ids.unique())
        assert ids.max() < E, "a row of padding"
        assert num_hit >= (CHOSEN if len(ids) == 1 else 4 if len(ids) == 2 else 7)


@pytest.mark.parametrize(
    "way, measured, rows",
    [("plain", {1, 2, 4}, 4), ("fixed", {3, 6, 12}, 12), ("auto", {1, 2, 4, 8, 16}, 16)],
)
def test_few_rows_have_a_price_each(monkeypatch, runner_of, chosen, way, measured, rows):
    """16 rows share tiles, and read five times the experts that one row does."""
    monkeypatch.setattr(step_times, "mark", HostMark)
    runner = runner_of(way)
    with runner.stopping_below(NEVER):
        costs = measure_costs(runner)
    assert {len(ids) for ids in chosen if len(ids) < 64} == measured
    assert [n for n, _ in costs.rounds] == [*range(min(measured), rows + 1)]
    levels = {1, 2, 4} if way == "auto" else set()
    assert {n for n, _ in costs.level} == levels


def test_each_run_of_a_step_has_the_rows_of_the_first(monkeypatch, runner_of, chosen):
    """A round accepts, and drafts anew; before the next one all is as it was."""
    monkeypatch.setattr(step_times, "mark", HostMark)
    runner = runner_of("auto")
    shape = runner.sizes.shape_of(4)
    step_times.Timed(runner, round_of(runner, 4, shape, next_shape=chain(1), shared_rows=12))
    first, second = chosen
    assert torch.equal(first, second)


def test_a_round_of_trees_is_full(monkeypatch, runner_of, chosen):
    monkeypatch.setattr(step_times, "mark", HostMark)
    runner = runner_of("auto")
    shape = runner.sizes.shape_of(2, is_wide=True)
    timed = step_times.Timed(runner, round_of(runner, 2, shape))
    assert timed.step.num_verify_rows == 2 * TREE.num_rows == len(chosen[0])
    assert (chosen[0] < E).all()
    paths = runner.buffers.path_rows[: TREE.num_rows]
    assert [int((path >= 0).sum()) for path in paths] == [1, 2, 2, 3, 3, 3]


def test_a_key_is_priced_by_requests_that_stay_the_same(monkeypatch, runner_of):
    monkeypatch.setattr(step_times, "mark", HostMark)
    runner = runner_of("plain")
    seen = []
    forward = runner.target.forward
    of = runner.buffers
    runner.target.forward = lambda step: (
        seen.append((of.input_ids[:4].tolist(), of.positions[:4].tolist())),
        forward(step),
    )
    first, later, num_keys = _keys(runner)
    tokens, positions = zip(*seen, strict=True)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert len(set(tokens[0])) == 4
    assert positions == ([62] * 4, [62] * 4, [125] * 4, [125] * 4)
    assert num_keys == 4 * (128 - 62)
    assert first.step.state_rows == later.step.state_rows == range(4)


def test_a_dense_target_is_measured_with_padding(runner_of):
    runner = runner_of("fixed", "eagle3")
    for step in (round_of(runner, 4, PLAIN), prompts(runner, [9])):
        assert spread(runner, step) == (step, None)


def test_prompts_differ_by_rows_and_not_by_runs(runner_of):
    runner = runner_of("plain")
    step = prompts(runner, [40, 9])
    (found, prepare), (again, _) = (spread(runner, step) for _ in "ab")
    assert prepare is None
    assert [part.prompt for part in found.parts] == [part.prompt for part in again.parts]
    assert [len(part.prompt) for part in found.parts] == [40, 9]
    assert len(set(found.parts[0].prompt)) > 25
    assert dataclasses.replace(found, parts=step.parts) == step


@pytest.mark.parametrize("max_model_len, start", [(160, 64), (64, 58), (6, 0), (4, 0)])
def test_requests_have_a_context_and_room_for_their_drafts(max_model_len, start):
    sizes = EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=4,
        num_kv_blocks=4,
        num_speculative_tokens=5,
    )
    assert context(sizes) == start
