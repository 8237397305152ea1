"""What steps cost, and how many rows of prompts ride, against a search over all numbers of them."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from specdec.scheduling.costs import (
    LEAST_PROMPT_ROWS,
    PromptBudget,
    StepCosts,
    StepKind,
    StepTimes,
    TreeCosts,
)
from specdec.sizes import PLAIN, DraftShape, TreeShape

COSTS = StepCosts(
    rounds=((8, 4.0), (64, 4.4), (256, 8.0)),
    mixed=((64, 5.0), (128, 5.5), (256, 8.2), (512, 13.0), (1024, 25.0)),
    plain=((8, 3.5), (64, 3.9)),
    level=((8, 0.2), (64, 0.4)),
    ms_per_key=1e-5,
    ms_per_pair=2e-6,
)
CHAIN, TREE = DraftShape(3, 1, 3), DraftShape(5, 4, 15)
MOST = 8192


def test_a_step_costs_what_the_next_measured_one_does_and_beyond_them_by_the_row():
    assert COSTS.round_ms(9) == 4.4
    assert COSTS.mixed_ms(128) == 5.5
    assert COSTS.mixed_ms(129) == 8.2
    assert COSTS.mixed_ms(768) == 25.0  # padded to 1,024
    assert COSTS.mixed_ms(2048) == 50.0
    assert replace(COSTS, mixed=()).mixed_ms(64) == 4.4


def test_steps_whose_rows_vary_cost_what_lies_between_measured_ones():
    rows = np.array([64, 96, 128, 2048])
    assert COSTS.mean_mixed_ms(rows).tolist() == pytest.approx([5.0, 5.25, 5.5, 50.0])


def test_levels_beyond_the_first_are_priced_and_those_after_the_stop_are_cheap():
    assert COSTS.drafts_ms(CHAIN, 8, 3.0) == pytest.approx(2 * 0.2)
    costs = replace(COSTS, skipped_ms=0.01)
    assert costs.drafts_ms(CHAIN, 9, 1.5) == pytest.approx(0.5 * 0.4 + 1.5 * 0.01)
    assert costs.drafts_ms(PLAIN, 8, 0.0) == -0.2, "a round has the first level in it"


def test_a_round_of_trees_takes_the_time_of_the_levels_that_run():
    trees = TreeCosts(
        all_levels=((2, 9.0), (8, 12.0)),
        one_level=((2, 5.0), (8, 6.0)),
        shape=TreeShape(num_levels=5, top_k=4, num_nodes=15),
    )
    assert [trees.ms(n, 1) for n in (1, 2, 3)] == [5.0, 5.0, 6.0]
    assert [trees.ms(1, levels) for levels in (2, 3.5, 5)] == [6.0, 7.5, 9.0]
    assert replace(trees, one_level=()).ms(8, 1) == 12.0
    costs = replace(COSTS, tree=trees)
    for num_run in (1.0, 3.5):
        ms = costs.round_ms(2 * 16) + costs.drafts_ms(TREE, 2, num_run)
        assert ms == pytest.approx(trees.ms(2, num_run))


@given(
    num_verify_rows=st.integers(1, 1200),
    num_keys=st.integers(0, 10**5),
    start=st.integers(0, 20000),
    slowdown=st.floats(1.0, 4.0),
)
def test_no_more_and_no_fewer_rows_ride_than_the_slowdown_allows(
    num_verify_rows, num_keys, start, slowdown
):
    budget = PromptBudget(costs=COSTS, slowdown=slowdown)
    keys_ms = COSTS.ms_per_key * num_keys
    limit = slowdown * (COSTS.round_ms(num_verify_rows) + keys_ms)

    def fits(rows: int) -> bool:
        pairs = rows * start + rows * rows // 2
        return COSTS.mixed_ms(num_verify_rows + rows) + keys_ms + 2e-6 * pairs <= limit

    rows = budget.rows(num_verify_rows, num_keys, start, 0, MOST)
    assert rows >= LEAST_PROMPT_ROWS
    assert fits(rows) or not fits(LEAST_PROMPT_ROWS)
    # all that a larger step holds
    sizes = [size - num_verify_rows for size in range(512, MOST, 512)]
    assert not any(fits(size) for size in sizes if size > rows)


def test_a_long_wait_lets_more_ride_but_no_more_than_there_are():
    budgets = [PromptBudget(costs=COSTS, slowdown=each) for each in (1.0, 1.9, 3.4)]
    rows = [each.rows(128, 0, 0, 0, MOST) for each in budgets]
    assert rows == [LEAST_PROMPT_ROWS, 384, 896]
    assert [each.rows(128, 0, 0, 0, 100) for each in budgets] == [LEAST_PROMPT_ROWS, 100, 100]


def test_as_many_ride_as_arrive_on_average_whatever_the_wait():
    budget = PromptBudget(costs=COSTS, slowdown=1.5)
    assert [budget.rows(256, 0, 0, each, MOST) for each in (0, 64, 65, 256, 257)] == [
        *(LEAST_PROMPT_ROWS, LEAST_PROMPT_ROWS),
        *(256, 256, 768),
    ]


def test_costs_of_nothing_end_the_search():
    costs = StepCosts(rounds=((8, 0.0),), mixed=((8, 0.0),))
    assert PromptBudget(costs=costs, slowdown=1.5).rows(4, 0, 0, 0, 1000) == 1000


def told(times, num_requests, shape, ratio, count=300, host_ms=0.0):
    for _ in range(count):
        times.add(StepKind(num_requests, False, shape), 4.0, 4.0 * ratio, host_ms)


def ratio_of(times, num_requests, shape, has_prompts=False):
    return times.known(StepKind(num_requests, has_prompts, shape))[0]


def test_times_are_compared_by_load_and_kind():
    times = StepTimes()
    told(times, 40, CHAIN, 1.25)
    assert ratio_of(times, 63, CHAIN) == ratio_of(times, 32, DraftShape(1, 1, 1))
    assert ratio_of(times, 63, CHAIN) == pytest.approx(1.25, rel=0.01)
    assert ratio_of(times, 32, PLAIN) == 1.0
    assert ratio_of(times, 64, CHAIN) == 1.0
    assert ratio_of(times, 40, CHAIN, has_prompts=True) == 1.0, "steps with prompts are others"
    told(times, 20, CHAIN, 3.5)
    assert ratio_of(times, 31, CHAIN) > 3.4


def test_kinds_that_do_not_run_are_forgotten_slowly():
    times = StepTimes()
    told(times, 40, PLAIN, 1.5)
    told(times, 40, CHAIN, 1.0, 100)
    assert 1.3 < ratio_of(times, 40, PLAIN) < 1.5
    told(times, 40, CHAIN, 1.0, 2000)
    assert ratio_of(times, 40, PLAIN) < 1.04


def test_one_step_that_took_long_moves_what_is_known_little():
    times = StepTimes()
    told(times, 1, CHAIN, 1.0, 100, host_ms=2.0)
    told(times, 1, CHAIN, 50.0, 1, host_ms=150.0)
    ratio, host_ms = times.known(StepKind(1, False, CHAIN))
    assert ratio < 1.04
    assert 2.0 <= host_ms < 2.1


def test_trees_take_as_many_times_as_long_as_chains_until_one_was_timed():
    times = StepTimes()
    told(times, 4, PLAIN, 1.1)
    told(times, 4, CHAIN, 1.5)
    assert ratio_of(times, 4, TREE) == pytest.approx(1.5, rel=0.01)
    told(times, 4, TREE, 1.2, 64)
    assert 1.2 < ratio_of(times, 4, TREE) < 1.35


def test_no_step_is_shorter_than_what_the_host_does_for_it():
    times, kind = StepTimes(), StepKind(64, False, CHAIN)
    told(times, 64, CHAIN, 1.5, host_ms=6.0)  # 6 ms, in which the host never waited
    assert times.known(kind) == (1.0, pytest.approx(6.0, rel=0.01))
    assert times.ms(kind, np.array([4.0, 7.0])) == pytest.approx([6.0, 7.0], rel=0.01)
    told(times, 64, CHAIN, 1.5, host_ms=5.0)
    assert times.known(kind) == pytest.approx((1.5, 5.0), rel=0.01)
    assert times.ms(kind, 4.0) == pytest.approx(6.0, rel=0.01)
    assert times.ms(StepKind(64, False, PLAIN), 4.0) == 4.0


def test_a_host_that_was_slow_once_is_not_held_to_be_slow():
    times, kind = StepTimes(), StepKind(8, False, CHAIN)
    told(times, 8, CHAIN, 20.0, 1, host_ms=80.0)  # the first step of this load: it compiles
    assert times.ms(kind, 4.0) < 4.3
    told(times, 8, CHAIN, 20.0, 200, host_ms=80.0)
    assert times.ms(kind, 4.0) > 40
    told(times, 8, PLAIN, 1.0, 2000, host_ms=1.0)
    assert times.ms(kind, 4.0) < 8, "plain rounds show that the host is fast again"
