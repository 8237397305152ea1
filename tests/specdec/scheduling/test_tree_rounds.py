"""Trees, chains or plain rounds: the choice against a search, and in a closed loop."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from specdec.scheduling.probes import FIRST_WAIT, KIND_ROUNDS, PROBE_EVERY, KindProbes
from specdec.scheduling.row_planner import RowPlanner, StepSize
from specdec.scheduling.step_costs import RoundCosts, TreeCosts
from specdec.scheduling.tree_rounds import (
    AHEAD,
    BETTER_STARTS,
    PRIOR,
    TreeGain,
    TreeRounds,
)
from specdec.sizes import TreeShape
from tests.specdec.scheduling.draft_world import (
    BOASTFUL,
    COSTS,
    GOOD,
    TREES,
    WITH_TREES,
    Draft,
    World,
)
from tests.specdec.scheduling.test_row_planner import coming, outcome

K = 4
SHALLOW = replace(TREES, shape=replace(TREES.shape, num_levels=K))
EASY = Draft(means=(0.8, 0.78, 0.76, 0.75, 0.74, 0.73, 0.72, 0.71))
HARD = Draft(means=(0.45, 0.4, 0.36, 0.34, 0.33, 0.32, 0.31, 0.3))
SHAPES = [(b, b * m) for b in (1, 2, 4, 8) for m in (1, 2, 5)]


def taught(costs, num_requests, confidence, num_rounds=24):
    """A planner that has seen chains of which as many hold as they say."""
    planner = RowPlanner(costs, SHAPES, K)
    chance = np.random.default_rng(0)
    for _ in range(num_rounds):
        held = (chance.random((num_requests, K)) < confidence).cumprod(axis=1).sum(axis=1)
        planner.observe(outcome(num_requests, confidence=confidence, num_accepted=held))
    return planner


@settings(max_examples=60, deadline=None)
@given(
    num_requests=st.sampled_from([1, 2, 3, 8]),
    confidence=st.floats(0.02, 0.95),
    verify_ms=st.floats(1.0, 8.0),
    level_ms=st.floats(0.0, 2.0),
    tree_ms=st.floats(1.0, 20.0),
    num_keys=st.integers(0, 3000),
)
def test_the_kind_is_that_of_an_exhaustive_search(
    num_requests, confidence, verify_ms, level_ms, tree_ms, num_keys
):
    n = num_requests
    costs = RoundCosts(
        verify=tuple((rows, verify_ms + 0.05 * rows) for rows in (1, 2, 4, 8, 16, 20, 40)),
        plain=((8, 2.0),),
        level=((8, level_ms),),
        ms_per_key=1e-3,
        tree=TreeCosts(
            all_levels=((8, tree_ms),), shape=TreeShape(num_levels=K, top_k=2, num_nodes=9)
        ),
    )
    planner = taught(costs, n, confidence)
    curves, keys_ms = planner._curves, 1e-3 * num_keys
    tree_rate = (n + PRIOR * curves.gain(K, K * n, n)) / (tree_ms + keys_ms)
    padded = min(b for b, _ in SHAPES if b >= n)
    rates = {0: n / (2.0 + keys_ms)}
    for levels in range(1, K + 1):
        rates[levels] = max(
            (n + curves.gain(levels, rows - n, n))
            / (costs.verify_ms(rows) + (levels - 1) * level_ms + keys_ms)
            for b, rows in SHAPES
            if b == padded and rows >= n
        )
    best = max(rates.values())
    assume(abs(tree_rate / best - 1) >= 2 * AHEAD)
    plan = planner.plan(coming(n, n, 0, num_keys, 0, trees_fit=True))
    assert plan.proposes_tree == (tree_rate > best)
    if plan.proposes_tree:
        assert plan.num_levels == K
    else:
        assert rates[plan.num_levels] == pytest.approx(best)
    assert not planner.plan(
        coming(n, n, 0, num_keys, 0, trees_fit=False)
    ).proposes_tree  # they do not fit


def test_without_costs_of_trees_none_is_drafted():
    planner = taught(COSTS, 1, 0.9)
    assert not any(
        planner.plan(coming(1, 1, 0, 0, 0, trees_fit=True)).proposes_tree for _ in range(300)
    )


def test_prompts_that_ride_make_trees_dear_where_their_rows_do():
    """Beside prompts 10 rows of a tree are more than the step's size holds."""
    tree = TreeCosts(all_levels=((8, 3.0),), shape=TreeShape(num_levels=K, top_k=2, num_nodes=9))
    verify, mixed = ((40, 2.5),), ((68, 3.0), (512, 30.0))
    costs = RoundCosts(verify=verify, plain=((8, 2.0),), level=((8, 0.3),), mixed=mixed, tree=tree)
    for num_prompt_rows, is_tree in ((0, True), (60, False)):
        planner = taught(costs, 1, 0.9)
        kinds = [
            planner.plan(coming(1, 1, 0, 0, num_prompt_rows, trees_fit=True)).proposes_tree
            for _ in range(60)
        ]
        assert kinds[-1] == is_tree


@pytest.mark.parametrize("num_requests", [1, 4])
def test_trees_run_where_they_pay(num_requests):
    world = World(num_requests, costs=WITH_TREES, better=1.7).run(900)
    chains = World(num_requests, costs=replace(WITH_TREES, tree=None)).run(900)
    assert world.rate(300) > 1.02 * chains.rate(300)
    assert np.mean(world.kinds[300:]) > 0.6
    shown = world.planner.statistics
    assert shown.num_tree_rounds == sum(world.kinds[:-1])
    assert shown.tree_share == pytest.approx(np.mean(world.kinds[:-1]))
    assert shown.measured_tokens == pytest.approx(shown.predicted_tokens, rel=0.1)


def test_rounds_of_trees_tell_what_chains_bring():
    """A few rounds of chains, by chance good ones, came before those of trees."""
    planner = RowPlanner(replace(COSTS, tree=SHALLOW), SHAPES, K)
    for _ in range(8):
        planner.observe(outcome(1, confidence=0.9, num_accepted=np.array([K])))
    before = planner._tree_curves.gain(K, K, 1)
    assert before > 0.8 * K
    for _ in range(200):
        chains = outcome(1, confidence=0.5, num_accepted=np.array([1]))
        planner.observe_trees(chains, num_verified=9, num_accepted=2)
    assert planner._tree_curves.gain(K, K, 1) == pytest.approx(1, abs=0.15)
    shown = planner.statistics
    assert shown.measured_tokens > 0.85 * shown.predicted_tokens


def test_trees_stop_by_the_drafts_own_probabilities_and_chains_by_calibrated_ones():
    """The draft says 0.9, and half of its drafts hold."""
    costs = replace(WITH_TREES, tree=SHALLOW)
    planner = RowPlanner(costs, SHAPES, K, threshold=0.3)
    chance = np.random.default_rng(0)
    for _ in range(200):
        held = (chance.random((1, K)) < 0.5).cumprod(axis=1).sum(axis=1)
        planner.observe(outcome(1, confidence=0.9, num_accepted=held))
    [chains], [trees] = planner._estimate.chains, planner._estimate.trees
    assert chains.levels_run[-1] == pytest.approx(2, abs=0.01)  # the second path has 0.25
    assert trees.levels_run[-1] == K
    assert 0.5 < chains.gain(K, K, 1) < trees.gain(K, K, 1) < 1


def test_the_first_probes_of_another_kind_come_early_unless_it_is_far_behind():
    for loss, waits in ((0.0, [8, 16, 32, 64, 64]), (0.25, [150] * 5)):
        probes = KindProbes()
        due = [probes.is_due(loss) for _ in range(sum(waits) + 5 * KIND_ROUNDS)]
        starts = [i for i, is_due in enumerate(due) if is_due and not due[i - 1]]
        gaps = np.diff([-KIND_ROUNDS, *starts]) - KIND_ROUNDS
        assert gaps.tolist() == [waits[0] - 1, *waits[1:]]


@pytest.mark.parametrize(
    "num_requests, better",
    [(1, 0.5), (8, 1.0), pytest.param(8, 0.5, marks=pytest.mark.slow)],
)
def test_trees_that_accept_little_are_left_and_tried_again(num_requests, better):
    world = World(num_requests, costs=WITH_TREES, better=better).run(900)
    chains = World(num_requests, costs=replace(WITH_TREES, tree=None)).run(900)
    late = world.kinds[200:]
    assert 0 < np.mean(late) < 0.1
    assert world.rate(200) > 0.975 * chains.rate(200)  # some of it is luck


def test_trees_stop_where_their_own_levels_no_longer_pay():
    """A level of theirs costs 0.2 ms in these costs, and next to nothing in a chain."""
    costs = replace(WITH_TREES, level=((256, 0.04),))
    world = World(2, costs=costs, better=3.0).run(500)
    chains = World(2, costs=replace(costs, tree=None)).run(500)
    assert np.mean(world.kinds[-100:]) > 0.9
    assert world.threshold > chains.threshold


def test_trees_made_good_are_found():
    world = World(8, costs=replace(WITH_TREES, verify=((512, 4.3),)), better=0.5).run(400)
    assert np.mean(world.kinds[-200:]) < 0.1
    world.better = 3.0
    world.run(2500)
    assert np.mean(world.kinds[-100:]) > 0.9


def test_a_draft_gone_bad_is_dropped_though_trees_run():
    world = World(1, costs=WITH_TREES, better=1.7).run(500)
    assert np.mean(world.kinds[-100:]) > 0.8
    world.draft = BOASTFUL
    world.run(250)
    start = len(world.ms)
    world.run(300)
    assert world.rate(start) > 0.97 * 1000 / world.costs.plain_ms(1)
    world.draft = GOOD
    world.run(1500)
    assert np.mean(world.kinds[-300:]) > 0.5


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(6), marks=pytest.mark.slow)])
def test_sampled_requests_are_not_judged_by_greedy_ones_before_them(seeds):
    """Whose trees ran, so that of chains hardly any round has shown how sampled ones do.

    Drafts that stop would soften the mistake.
    """
    costs = replace(WITH_TREES, skipped_ms=None)

    def harder_texts(are_sampled):
        """Rate, and tokens measured by predicted, of the first rounds after greedy ones."""
        rates, ratios = [], []
        for seed in seeds:
            world = World(8, EASY, seed, costs=costs, better=1.5).run(500)
            before = world.planner.statistics
            world.draft, world.is_sampled = HARD, are_sampled
            shown = world.run(150).planner.statistics.since(before)
            rates.append(world.rate(500))
            ratios.append(shown.measured_tokens / shown.predicted_tokens)
        return np.mean(rates), np.mean(ratios)

    rate, ratio = harder_texts(are_sampled=True)
    assert ratio == pytest.approx(1, abs=0.06)
    rate_if_greedy, ratio_if_greedy = harder_texts(are_sampled=False)
    assert ratio_if_greedy < 0.85, "the same texts surprise where nothing tells them apart"
    assert rate > 1.03 * rate_if_greedy


def test_steps_with_trees_have_times_of_their_own():
    planner = taught(replace(COSTS, tree=SHALLOW), 1, 0.9)
    size = StepSize(
        num_requests=1, num_rows=16, num_prompt_rows=0, num_levels=0, num_keys=0, has_trees=True
    )
    before = planner._tree_rate((1, 1), planner._curves, 0.0)
    for _ in range(200):
        planner.observe_time(size, 1.5 * TREES.all_levels[0][1])
    assert planner._tree_rate((1, 1), planner._curves, 0.0) < 0.75 * before
    assert planner._ratios.of(1, False) == (1.0, 1.0)


def test_the_gain_of_trees_forgets_what_is_beyond_its_memory():
    gain = TreeGain()
    assert gain.ratio == PRIOR
    for _ in range(100):
        gain.add(30, 20, memory=100.0)
    assert gain.ratio == pytest.approx(1.5)
    for _ in range(5):
        gain.add(10, 20, memory=100.0)
    assert 0.7 < gain.ratio < 1.0


def test_a_kind_is_kept_until_the_other_is_clearly_faster():
    rounds = TreeRounds(K)
    rates = (1.01, 1.02, 1.0, 0.99, 0.98, 1.01)
    chosen = [rounds.choose(rate, BETTER_STARTS) for rate in rates]
    assert chosen == [False, True, True, True, False, False]


def test_at_equal_rates_drafts_are_trees():
    """Which of both begins at better places is not in the rates."""
    assert TreeRounds(K).choose(1.0, 1.0)


def test_trees_are_no_probe_where_no_draft_pays():
    rounds = TreeRounds(K)
    assert not any(rounds.choose(0.95, 1.0, drafts_pay=False) for _ in range(4 * PROBE_EVERY))
    assert any(rounds.choose(0.95, 1.0, drafts_pay=True) for _ in range(4 * PROBE_EVERY))
    assert rounds.choose(1.1, 1.0, drafts_pay=False)  # they pay themselves
    assert not all(rounds.choose(1.05, 1.0, drafts_pay=False) for _ in range(4 * PROBE_EVERY))


def test_probes_of_the_other_kind_are_rarer_the_more_they_cost():
    for loss, wait in ((0.0, PROBE_EVERY), (0.5, KIND_ROUNDS * 100)):
        probes = KindProbes()
        while FIRST_WAIT * 2**probes.num_probes < wait:  # the first ones come early
            probes.is_due(0.0)
        due = [probes.is_due(loss) for _ in range(3 * (wait + KIND_ROUNDS))]
        assert sum(due) == 3 * KIND_ROUNDS
        assert due.index(True) == wait - 1
