"""The planner in a closed loop without an engine: never worse than the best fixed setting.

Times are those of an 8B target on an H200. Both settings meet the same requests and chances, so
that what is left to chance is small.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.specdec.scheduling.draft_world import (
    BOASTFUL,
    COSTS,
    GOOD,
    MIXED,
    RANDOM,
    TIMID,
    WITH_TREES,
    World,
)

FIXED = (0, 1, 2, 3, 5)
EARLY = 50


def rate(fixed, num_requests, draft, num_rounds, start, seed=0, switch=None):
    """Tokens per second since round `start`."""
    world = World(num_requests, draft, seed, fixed)
    if switch is not None:
        world.run(switch)
        world.draft = GOOD
    return world.run(num_rounds - len(world.ms)).rate(start)


def best_rate(*given):
    """Of the fixed settings, which do not heed what a draft says of itself."""
    return max(rate(fixed, *given) for fixed in FIXED)


def slow(*values):
    """Parameters that repeat what others show."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("num_requests", [1, 8, 32, 256, *slow(16, 64, 128)])
def test_a_good_draft_is_never_below_98_percent_of_the_best_fixed_setting(num_requests):
    num_rounds = 1200 if num_requests == 1 else 350
    best = best_rate(num_requests, GOOD, num_rounds, EARLY)
    for draft in (GOOD, TIMID):  # of which the same drafts hold
        assert rate(None, num_requests, draft, num_rounds, EARLY) > 0.98 * best


@pytest.mark.parametrize("num_requests", [64, 256, *slow(128)])
def test_many_requests_gain_by_sharing_rows(num_requests):
    given = num_requests, GOOD, 300, EARLY
    assert rate(None, *given) > 1.02 * best_rate(*given)


@pytest.mark.parametrize("num_requests, slower", [(256, 1.3), (64, 1.9), (8, 1.1)])
def test_steps_that_take_longer_than_their_costs_say_are_chosen_less(num_requests, slower):
    """And where drafts pay all the same, they are made."""
    world = World(num_requests, slower=slower).run(400)
    fixed = [World(num_requests, fixed=each, slower=slower).run(400).rate(150) for each in FIXED]
    assert world.rate(150) > 0.97 * max(fixed)  # probes are dear here
    assert (np.mean([plan.num_levels for plan in world.plans[150:]]) < 0.2) == (num_requests > 8)
    shown = world.planner.statistics
    assert 1 <= shown.measured_ms / shown.predicted_ms < slower + 0.01


@pytest.mark.parametrize(
    "num_requests, slower", [(256, 1.12), pytest.param(64, 1.12, marks=pytest.mark.slow)]
)
def test_a_step_with_fewer_tokens_has_fewer_prompts(num_requests, slower):
    """Were there as many in each step, those with drafts would seem to have them for less."""
    given = {"answer": 96, "slower": slower, "costs": replace(COSTS, mixed=MIXED)}
    rates = [World(num_requests, **given).run(400).rate(100)]
    rates += [World(num_requests, fixed=each, **given).run(400).rate(100) for each in FIXED[:3]]
    assert rates[0] > 0.98 * max(rates)


@pytest.mark.parametrize("becomes", [RANDOM, GOOD], ids=["random", "good"])
def test_what_slowed_all_steps_for_a_while_is_forgotten(becomes):
    world = World(128).run(200)
    world.disturbed = 1.9
    world.run(150)
    world.disturbed, world.draft = 1.0, becomes
    world.run(2000)
    levels = np.mean([plan.num_levels for plan in world.plans[-300:]])
    assert levels < 0.2 if becomes is RANDOM else levels > 0.8


@pytest.mark.parametrize(
    "num_requests, gain",
    [(1, 1.015), (4, 0.997), pytest.param(2, 0.997, marks=pytest.mark.slow)],
)
def test_few_requests_gain_where_drafts_stop(num_requests, gain):
    """The same chances, round by round, with thresholds and without."""
    never, stopping = (
        World(num_requests, GOOD, costs=replace(COSTS, skipped_ms=skipped_ms)).run(1200)
        for skipped_ms in (None, 0.03)
    )
    assert stopping.rate(EARLY) > gain * never.rate(EARLY)
    shown = stopping.planner.statistics
    assert shown.measured_tokens == pytest.approx(shown.predicted_tokens, rel=0.04)
    assert stopping.rate(EARLY) > 0.99 * best_rate(num_requests, GOOD, 1200, EARLY)


@pytest.mark.parametrize("num_requests", [1, 256, *slow(8, 64)])
@pytest.mark.parametrize("draft", [RANDOM, BOASTFUL], ids=["random", "boastful"])
@pytest.mark.parametrize("costs", [COSTS, WITH_TREES], ids=["chains", "trees"])
def test_a_draft_that_never_holds_costs_little(num_requests, draft, costs):
    """2 % at most; on a GPU plain rounds that extend its KV take 1.4 % of that."""
    world = World(num_requests, draft, costs=costs).run(EARLY + 192)
    plain = World(num_requests, draft, fixed=0, costs=costs).run(EARLY + 192)
    assert world.rate(EARLY) > 0.9935 * plain.rate(EARLY)
    assert world.planner.statistics.num_probes > 2


@pytest.mark.parametrize("num_requests", [256, *slow(1, 8, 64)])
def test_a_draft_made_good_again_is_found_within_200_rounds(num_requests):
    ratios = []
    for seed in range(6 if num_requests == 1 else 2):
        switch, draft = 130 + 17 * seed, (BOASTFUL, RANDOM)[seed % 2]
        given = num_requests, draft, switch + 500, switch + 200, seed, switch
        ratios.append(rate(None, *given) / best_rate(*given))
        assert ratios[-1] > 0.9  # the best of five settings over 300 rounds is partly luck
    assert np.mean(ratios) > 0.95


@pytest.mark.parametrize("num_requests", [1, 256, *slow(32)])
def test_a_draft_gone_bad_is_dropped_within_100_rounds(num_requests):
    world = World(num_requests).run(300)
    assert world.plans[-1].num_levels > 0
    world.draft = BOASTFUL
    world.run(100)
    start = len(world.ms)
    plain = 1000 * num_requests / world.costs.plain_ms(num_requests)
    assert world.run(128).rate(start) > 0.98 * plain


def test_a_ramp_beats_the_best_single_setting():
    def ramp(fixed):
        world = World(1, fixed=fixed)
        sizes = [1, 2, 4, 8, 16, 32, 64, 100, 128, 180, 256]
        for num_requests in [*sizes, *sizes[-2::-1]]:
            world.resize(num_requests)
            world.run(60)
        return world.rate(0)

    assert ramp(None) > 1.02 * max(map(ramp, FIXED))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_bounds_of_requests_are_kept(allowed):
    world = World(8, GOOD, allowed=allowed).run(150)
    bounded = World(8, GOOD, fixed=min(allowed, 3), allowed=allowed).run(150)
    levels = [plan.num_levels for plan in world.plans[EARLY:]]
    assert np.median(levels) == allowed
    assert max(levels) <= allowed + (allowed > 0)  # a probe
    assert world.rate(EARLY) > 0.98 * bounded.rate(EARLY)


def test_predictions_are_those_of_what_comes():
    for num_requests in (8, 64, 256):
        shown = World(num_requests).run(400).planner.statistics
        assert shown.predicted_tokens == pytest.approx(shown.measured_tokens, rel=0.03)
