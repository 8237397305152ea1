"""The planner's choice against a search over all that a round may be; its statistics; its speed."""

import time
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from specdec.scheduling.costs import StepCosts, TreeCosts
from specdec.scheduling.gains import GainCurve, Sample
from specdec.scheduling.outcomes import RoundOutcome
from specdec.scheduling.planner import NEARLY, NextRound, Planner, RoundPlan, StepSize
from specdec.scheduling.ways import THRESHOLDS, Load, PromptLoad, Ways, chain
from specdec.sizes import PLAIN, TreeShape

K = 4
GRID = [(b, b * m) for b in (1, 2, 4, 8, 16) for m in (1, 2, 3, 5)]
SIZES = [(b, b * m) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) for m in (1, 2, 3, 4, 6)]
COSTS = StepCosts(
    rounds=((64, 4.2), (128, 4.5), (192, 6.0), (256, 7.8), (384, 10.3), (512, 12.6)),
    plain=((64, 4.06), (128, 4.4), (256, 7.7)),
    level=((256, 0.2),),
)
TREE = TreeShape(num_levels=K, top_k=2, num_nodes=9)
SHAPE = TREE.of(1).drafts
# of 2 tokens or of 4, which hardly cost more for few requests
BLOCKS = ((2, ((8, 0.5), (64, 0.9), (256, 3.0))), (4, ((8, 0.55), (64, 2.4), (256, 6.0))))
OF_BLOCKS = replace(COSTS, level=(), blocks=BLOCKS)
WITH_TREES = replace(COSTS, tree=TreeCosts(all_levels=((8, 5.0),), shape=TREE))


def coming(num_requests, live=PLAIN, num_drafting=None, num_keys=0, **more):
    num_drafting = num_requests if num_drafting is None else num_drafting
    return NextRound(
        num_requests=num_requests, num_drafting=num_drafting, live=live, num_keys=num_keys, **more
    )


def outcome(
    num_requests, rate=0.5, num_accepted=0, levels=K, allowed=K, is_sampled=False, shape=None
):
    """A round of chains, or of trees with such levels, in which all drafts were verified."""
    bounds = np.broadcast_to(allowed, num_requests)
    rates = np.broadcast_to(rate, (num_requests, K)) * (np.arange(K) < levels)
    verified = np.minimum(bounds, levels)
    held = np.minimum(num_accepted, verified)
    probs = rates.cumprod(axis=1)
    of_trees = {}
    if shape is not None:  # of two nodes in each level, one is in the chain
        probs = np.pad(np.repeat(probs / 2, 2, axis=1), ((0, 0), (0, shape.nodes - 2 * K)))
        parents = [0, 0, *(row for row in range(1, 2 * K - 2, 2) for _ in range(2))]
        of_trees = {"parents": [parents] * num_requests, "num_on_chains": held // 2}
    return RoundOutcome(
        shape=shape or chain(levels),
        probs=probs,
        num_verified=verified if shape is None else np.full(num_requests, shape.nodes),
        num_accepted=held,
        num_allowed=bounds,
        is_sampled=np.full(num_requests, is_sampled),
        **of_trees,
    )


def calibrated(planner, rate, kind=0):
    """What the device says where the draft says `rate`."""
    odds = rate / (1 - rate) * planner.factors[kind]
    return odds / (1 + odds)


def taught(costs, num_requests, rate=0.5, num_rounds=24, levels=K, **options):
    """A planner that has seen chains of which as many hold as they say."""
    planner, chance = Planner(costs, SIZES, K, **options), np.random.default_rng(0)
    for _ in range(num_rounds):
        held = (chance.random((num_requests, K)) < rate).cumprod(axis=1).sum(axis=1)
        planner.observe(outcome(num_requests, rate, held, levels))
    return planner


def top_sum(held, num_levels, num_rows, num_requests):
    """The n largest of each group of num_requests, averaged; rows between two of them by share."""
    size = min(num_requests, len(held))
    groups = len(held) // size
    total = 0.0
    for g in range(groups):
        end = len(held) - g * size
        probs = sorted(p for row in held[end - size : end] for p in row[:num_levels])[::-1]
        rows = num_rows * size / num_requests
        whole = min(int(rows), len(probs))
        total += sum(probs[:whole])
        total += (rows - whole) * probs[whole] if whole < len(probs) else 0.0
    return total / groups * num_requests / size


@st.composite
def rising_costs(draw):
    """Measured at every captured size, monotone in rows."""
    ms = st.floats(0.0, 3.0)
    sizes = sorted({rows for _, rows in GRID})
    rounds = np.cumsum([draw(ms) for _ in sizes]) + draw(st.floats(0.5, 5.0))
    plain = np.cumsum([draw(ms) for _ in range(16)]) + draw(st.floats(0.5, 5.0))
    of_blocks = ((2, ((16, draw(ms)),)), (K, ((16, draw(ms)),)))
    return StepCosts(
        rounds=tuple(zip(sizes, rounds.tolist(), strict=True)),
        plain=tuple(enumerate(plain.tolist(), start=1)),
        level=((16, draw(st.floats(0.0, 1.0))),),
        blocks=draw(st.sampled_from([(), of_blocks])),
    )


@settings(max_examples=60, deadline=None)
@given(
    costs=rising_costs(),
    seed=st.integers(0, 10**6),
    num_requests=st.integers(1, 16),
    share=st.floats(0.1, 1.0),
    keys_ms=st.sampled_from([0.0, 1.5]),
)
def test_rates_are_those_of_an_exhaustive_search(costs, seed, num_requests, share, keys_ms):
    rng, n = np.random.default_rng(seed), num_requests
    held = np.cumprod(rng.random((rng.integers(8, 40), K)) ** rng.exponential(), axis=1)
    num_drafting = max(1, int(share * n))
    sample = Sample.of(held, held, np.ones(len(held)), num_drafting)
    ways, load = Ways(costs, GRID, None), Load(n, num_drafting, keys_ms, 0.0, 0)
    padded = min(b for b, _ in GRID if b >= n)
    sizes = sorted(rows for b, rows in GRID if b == padded)
    found = ways.chains(ways.curves(sample, num_drafting), load)
    drafts_ms = {levels: (levels - 1) * costs.level[0][1] for levels in range(1, K + 1)}
    if costs.blocks:
        drafts_ms = {levels: ms for levels, ((_, ms),) in costs.blocks}
    for levels, way in zip(drafts_ms, found, strict=True):
        best = max(
            (n + top_sum(held, levels, rows - n, num_drafting))
            / (dict(costs.rounds)[rows] + drafts_ms[levels] + keys_ms)
            for rows in sizes
        )
        assert (way.shape, way.rate) == (chain(levels), pytest.approx(best))
    assert ways.plain(load).rate == pytest.approx(n / (dict(costs.plain)[n] + keys_ms))


def test_beside_prompts_steps_cost_what_their_rows_add_to_those_of_plain_ones():
    costs = replace(COSTS, mixed=((64, 5.0), (128, 7.0), (256, 11.0)))
    ways, n = Ways(costs, SIZES, None), 64
    alone, some, all_steps = (Load(n, n, 0.0, share, 64) for share in (0.0, 0.5, 1.0))
    ms = [n / ways.plain(load).rate for load in (alone, some, all_steps)]
    assert ms[0] == pytest.approx(4.06), "a plain step has no draft"
    assert ms[2] == pytest.approx(5.0 - 0.2), "prompts are no part of it, nor is the first level"
    assert ms[1] == pytest.approx((ms[0] + ms[2]) / 2)
    held = np.ones((64, 1))
    curves = [GainCurve(Sample.of(held, held, np.ones(64), n), 0.0)]
    # 128 rows and 64 of prompts: half between 128 and 256 rows
    assert 2 * n / ways.chains(curves, all_steps)[0].rate == pytest.approx(9.0 - (7.0 - 5.0))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_the_next_shape_has_the_fewest_levels_of_those_nearly_as_good_as_the_best(
    num_requests, rate
):
    planner = taught(COSTS, num_requests, rate)
    shape = planner.plan(coming(num_requests)).next_shape
    [ways] = planner._known.values()
    best = max(way.rate for way in ways)
    assert [way.shape.levels for way in ways] == list(range(K + 1))
    assert next(way.rate for way in ways if way.shape == shape) >= NEARLY * best
    assert all(way.rate < NEARLY * best for way in ways if way.shape.levels < shape.levels)


def test_rows_of_drafts_that_exist_are_worth_the_best_rate_not_their_own():
    # 4 requests, two levels of chance 0.5 and 0.25: 4 rows more bring 2 tokens, or 1, in 1.2 ms.
    # With one level and 8 rows a millisecond brings 1.4 tokens, in a plain round 0.4 or 2.7.
    for plain_ms, expected in ((9.0, 8), (1.5, 4)):
        costs = StepCosts(
            rounds=((4, 3.0), (8, 4.2), (12, 5.4)), plain=((4, plain_ms),), level=((4, 50.0),)
        )
        planner = Planner(costs, [(4, 4), (4, 8), (4, 12)], 2)
        for _ in range(20):
            probs = np.tile([0.5, 0.25], (4, 1))
            planner.observe(
                replace(outcome(4), shape=chain(2), probs=probs, num_verified=np.zeros(4, int))
            )
        assert planner.plan(coming(4, chain(2))).num_rows == expected


def test_live_drafts_of_another_shape_are_verified_and_priced():
    """Trees are verified whole, whatever is drafted next, and chains share rows before trees."""
    planner = taught(WITH_TREES, 2, 0.9)
    plan = planner.plan(coming(2, SHAPE))
    assert plan.num_rows == 2 * SHAPE.rows
    assert plan.next_shape.width == 1
    plan = planner.plan(coming(2, chain(3), tree=SHAPE))
    assert plan.next_shape == SHAPE, "nothing is known of trees yet"
    assert plan.num_rows >= 6
    new = Planner(WITH_TREES, SIZES, K)
    assert new.plan(coming(2, SHAPE)).num_rows == 2 * SHAPE.rows
    hopeless = taught(WITH_TREES, 2, 0.01)
    assert hopeless.plan(coming(2, SHAPE)) == RoundPlan(2 * SHAPE.rows, PLAIN)


@pytest.mark.parametrize("tree_rate, is_tree", [(0.95, True), (0.3, False)])
def test_trees_are_drafted_where_their_own_rounds_brought_more(tree_rate, is_tree):
    planner, chance = taught(WITH_TREES, 4, 0.6), np.random.default_rng(0)
    shape = TREE.of(4).drafts
    for _ in range(20):
        held = (chance.random((4, K)) < tree_rate).cumprod(axis=1).sum(axis=1)
        planner.observe(outcome(4, tree_rate, held, shape=shape))
    plans = [planner.plan(coming(4, tree=shape)).next_shape for _ in range(300)]
    assert np.mean([each == shape for each in plans]) == pytest.approx(float(is_tree), abs=0.05)
    assert shape in plans, "trees are probed"
    assert any(each.width == 1 for each in plans) != is_tree, "chains need not be"
    assert planner.plan(coming(4)).next_shape.width == 1, "trees do not fit"
    assert taught(COSTS, 4).plan(coming(4, tree=shape)).next_shape.width == 1, "no costs of trees"


def test_a_plain_round_is_of_the_smallest_size_or_of_a_row_each():
    planner = Planner(COSTS, SIZES, K)
    assert planner.plan(coming(3, num_drafting=0)) == RoundPlan(4, PLAIN)
    assert planner.plan(coming(128, chain(3), num_drafting=0)) == RoundPlan(128, PLAIN)
    hopeless = taught(COSTS, 60, 0.01)
    assert hopeless.plan(coming(60)) == RoundPlan(60, PLAIN)


def test_the_first_rounds_draft_three_levels_and_verify_all_that_fits():
    planner = Planner(COSTS, SIZES, 8)
    assert planner.plan(coming(2)) == RoundPlan(2, chain(3))
    assert planner.plan(coming(2, chain(3))) == RoundPlan(8, chain(3))
    assert planner.plan(coming(256, chain(3))) == RoundPlan(1024, chain(3))
    assert Planner(COSTS, SIZES, 2).plan(coming(1)) == RoundPlan(1, chain(2))


@pytest.mark.parametrize(
    "num_requests, rate, levels",
    [
        *((n, 0.03, 0) for n in (1, 16, 64)),
        *((n, 0.95, 4) for n in (1, 8)),
        (64, 0.5, 2),
        (256, 0.5, 0),
    ],
)
def test_of_blocks_none_half_or_the_whole_is_drafted(num_requests, rate, levels):
    planner = taught(OF_BLOCKS, num_requests, rate)
    assert planner.plan(coming(num_requests)).next_shape == chain(levels)
    [ways] = planner._known.values()
    assert [way.shape.levels for way in ways] == [0, 2, 4]
    if levels:
        rows = planner.plan(coming(num_requests, chain(levels))).num_rows
        assert rows > num_requests
        assert (rows < num_requests * (1 + levels)) == (num_requests == 64)


def test_blocks_are_probed_by_the_next_longer_one():
    """And the first ones are the shortest that have as many tokens as the first levels."""
    longer = replace(OF_BLOCKS, blocks=((4, BLOCKS[0][1]), (8, BLOCKS[1][1])))
    assert Planner(longer, SIZES, 8).plan(coming(2)) == RoundPlan(2, chain(4))
    assert Planner(OF_BLOCKS, SIZES, K).plan(coming(2)) == RoundPlan(2, chain(4))
    for num_requests, rate, usual, probed in ((16, 0.03, 0, 2), (64, 0.5, 2, 4)):
        planner = taught(OF_BLOCKS, num_requests, rate)
        levels = [planner.plan(coming(num_requests)).next_shape.levels for _ in range(260)]
        assert {usual, probed} == {*levels}
        assert levels.count(probed) == planner.statistics.num_probes > 0


def test_one_bad_round_of_one_request_is_too_little_to_stop_drafting():
    planner = Planner(COSTS, SIZES, K)
    for num_rounds in range(8):
        assert planner.plan(coming(1, chain(3))).next_shape == chain(3), num_rounds
        planner.observe(outcome(1, 0.01, levels=3))
    assert planner.plan(coming(1)).next_shape == PLAIN


def test_more_requests_than_were_captured_are_refused():
    with pytest.raises(ValueError, match=r"num_requests=9: .*the largest is \(8, 16\)"):
        Planner(COSTS, [(1, 1), (8, 8), (8, 16)], K).plan(coming(9))
    with pytest.raises(ValueError, match="num_levels=0"):
        Planner(COSTS, SIZES, 0)


def test_bounds_of_requests_are_no_gain():
    planner = Planner(COSTS, SIZES, K)
    for _ in range(40):
        planner.observe(outcome(8, 0.9, 3, levels=3, allowed=np.array([0, 0, 0, 0, 2, 2, 2, 2])))
    assert planner.plan(coming(8, chain(2), num_drafting=4)) == RoundPlan(16, chain(2))
    assert planner.plan(coming(8, chain(2), num_drafting=0)) == RoundPlan(8, PLAIN)


def test_long_contexts_make_drafts_pay():
    costs = replace(COSTS, ms_per_key=1e-5)
    for num_keys, pays in ((0, False), (10**7, True)):
        plan = taught(costs, 256, 0.3).plan(coming(256, num_keys=num_keys))
        assert (plan.next_shape != PLAIN) == pays


def test_what_a_few_requests_bring_is_estimated_anew_once_more_is_known():
    """Numbers of requests alternate; none keeps what was known before."""
    planner = taught(COSTS, 2, 0.9)
    for n in (1, 2, 3):
        assert planner.plan(coming(n)).next_shape.levels > 1
    for _ in range(300):
        planner.observe(outcome(2, calibrated(planner, 0.9), 0))
    for n in (1, 2, 3):
        assert planner.plan(coming(n)).next_shape == PLAIN, n


def test_estimates_serve_until_more_is_known_and_almost_as_many_requests():
    planner = taught(COSTS, 32)
    for n in (2, 1, 2, 1, 32, 33, 34, 35):
        planner.plan(coming(n))
    assert {num for _, _, num in planner._estimates} == {1, 2, 32}


def test_greedy_rounds_say_nothing_about_sampled_ones():
    planner = taught(COSTS, 4, 0.9)
    assert planner.plan(coming(4, num_sampled=0)).next_shape == chain(K)
    assert planner.plan(coming(4, num_sampled=4)).next_shape == chain(3), "nothing is known"
    for _ in range(30):
        planner.observe(outcome(4, calibrated(planner, 0.9, 1), 0, is_sampled=True))
    assert planner.plan(coming(4, num_sampled=4)).next_shape == PLAIN
    assert planner.plan(coming(4, num_sampled=0)).next_shape.levels > 1


@pytest.mark.parametrize("skipped_ms, given", [(0.01, None), (0.01, 0.3), (None, None)])
def test_drafts_stop_where_it_pays_most(skipped_ms, given):
    """In every second round all drafts hold, and in the others none."""
    planner = Planner(replace(COSTS, level=((256, 0.8),), skipped_ms=skipped_ms), SIZES, K, given)
    for i in range(200):
        rate = (0.95, 0.01)[i % 2]
        planner.observe(outcome(1, rate, K * (i % 2 == 0)))
    assert planner.plan(coming(1, chain(K))).next_shape.levels > 1
    if skipped_ms is None:
        assert planner.threshold == 0
    else:
        assert planner.threshold in ((given,) if given else THRESHOLDS)
    planner.plan(coming(64, chain(K)))
    assert planner.threshold == (given or 0.0)  # of many the mean hardly changes


def test_rows_that_verify_make_room_for_prompts_in_the_tiles_of_a_step():
    planner = taught(COSTS, 64, 0.4, levels=3)
    assert planner.plan(coming(64, chain(3))).num_rows in dict(COSTS.rounds)
    beside = planner.plan(coming(64, chain(3), num_prompt_rows=50)).num_rows
    assert beside + 50 in dict(COSTS.rounds)


def test_the_load_of_prompts_is_a_running_average():
    load = PromptLoad()
    assert (load.share, load.num_rows) == (0, 0)
    for i in range(400):
        load.add(120 if i % 2 else 0)
    assert (load.share, load.num_rows) == (pytest.approx(0.5, abs=0.02), 120)
    for _ in range(400):
        load.add(0)
    assert (load.share, load.num_rows) == (pytest.approx(0, abs=0.01), 120)


@pytest.mark.parametrize(
    "num_requests, levels, num_prompt_rows, expected",
    [
        (4, 0, 0, 4.06),
        (4, 1, 0, 4.2),
        (4, 3, 0, 4.2 + 0.4),
        (4, 0, 100, 4.5 - 0.2),  # which has no first level
        (100, 3, 0, 12.6 + 0.4),
        (-4, 0, 100, 4.5),  # of blocks, whose rounds have none
        (-4, 2, 0, 4.2 + 0.5),
        (-9, 3, 0, 4.2 + 2.4),
    ],
)
def test_times_are_compared_with_those_of_the_kind_of_step(
    num_requests, levels, num_prompt_rows, expected
):
    planner = Planner(COSTS if num_requests > 0 else OF_BLOCKS, SIZES, K)
    num_requests = abs(num_requests)
    size = StepSize(
        num_requests=num_requests,
        num_rows=num_requests * (1 + levels),
        num_prompt_rows=num_prompt_rows,
        num_keys=0,
        shape=chain(levels),
    )
    planner.observe_time(size, 5.0, 0.0)
    shown = planner.statistics
    assert (shown.predicted_ms, shown.measured_ms) == (pytest.approx(expected), 5.0)


@pytest.mark.parametrize("faster", [0.8, 1.0])
def test_rates_beside_many_prompts_stay_those_of_steps(faster):
    """Steps with prompts may be faster than their costs say; what the prompts take is, too."""
    costs = replace(COSTS, mixed=tuple((rows, 4 + rows / 80) for rows in (64, 512, 4096, 8192)))
    planner = taught(costs, 32, 0.7)
    for _ in range(200):
        plan = planner.plan(coming(32, chain(K), num_prompt_rows=4096))
        size = StepSize(
            num_requests=32,
            num_rows=plan.num_rows,
            num_prompt_rows=4096,
            num_keys=0,
            shape=chain(K),
        )
        planner.observe_time(size, faster * planner._step_ms(size), 0.0)
        assert 32 / 12 < planner._best.rate < 32 * (K + 1) / 4


@pytest.mark.parametrize("plain_ms, levels", [(4.5, 0), (9.0, K)])
def test_where_the_host_takes_longer_than_the_device_its_time_decides(plain_ms, levels):
    planner = taught(COSTS, 8, 0.5)  # 0.94 of K drafts hold
    for shape, host_ms in ((PLAIN, plain_ms), (chain(K), 9.0)):
        size = StepSize(
            num_requests=8, num_rows=8 * shape.rows, num_prompt_rows=0, num_keys=0, shape=shape
        )
        for _ in range(200):
            planner.observe_time(size, host_ms, host_ms)
    assert planner.plan(coming(8, chain(K))).next_shape == chain(levels)


def test_a_choice_serves_for_a_few_rounds_and_no_longer():
    """Weighing all ways anew takes the host as long as a round of a small model takes the GPU."""
    planner = taught(COSTS, 8, 0.5)
    first = planner.plan(coming(8, chain(K))).next_shape
    size = StepSize(num_requests=8, num_rows=40, num_prompt_rows=0, num_keys=0, shape=chain(K))
    for _ in range(300):
        planner.observe_time(size, 50.0, 0.0)
    later = [planner.plan(coming(8, chain(K))).next_shape for _ in range(9)]
    assert first != PLAIN
    assert later[0] == first
    assert later[-1] == PLAIN


def test_a_choice_is_of_the_requests_that_may_draft():
    planner = taught(COSTS, 8, 0.5)
    for num_drafting, levels in ((8, 2), (1, 1), (4, 2)):
        assert planner.plan(coming(8, num_drafting=num_drafting)).next_shape == chain(levels)


def test_what_takes_long_is_left_until_the_gpu_has_other_work():
    planner = taught(COSTS, 2, 0.9)
    planner.plan(coming(2))

    def rounds_until_something_is_learned(has_time):
        while planner._pending:
            planner.observe(outcome(2, 0.9, 3))
        for count in range(1, 40):
            planner.observe(outcome(2, 0.9, 3), has_time)
            if not planner._pending:
                return count
        return None

    assert rounds_until_something_is_learned(has_time=True) == 8
    assert rounds_until_something_is_learned(has_time=False) == 16  # but not for ever


def test_rounds_without_drafts_teach_nothing():
    planner = Planner(COSTS, SIZES, K)
    for _ in range(20):
        planner.observe_plain(4)
        planner.observe(outcome(4, allowed=0))
    assert planner.plan(coming(4)) == RoundPlan(4, chain(3))
    assert planner.statistics.num_rounds == 40


def test_planning_and_observing_cost_microseconds():
    planner = taught(COSTS, 256, 0.9)
    planning, observing = [], []
    for _ in range(200):
        start = time.thread_time()
        planner.plan(coming(256, chain(2), num_keys=10**5))
        middle = time.thread_time()
        planner.observe(outcome(256, 0.9, 1))
        planning.append(middle - start)
        observing.append(time.thread_time() - middle)
    # 40 and 30 us, and now and then 0.5 ms for new estimates, on a quiet machine
    assert np.median(planning) < 5 * 50e-6
    assert np.median(observing) < 5 * 150e-6
    assert np.mean(planning) + np.mean(observing) < 5 * 400e-6
