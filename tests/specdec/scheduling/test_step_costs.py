"""How many rows of prompts ride, against a search over all numbers of them."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from specdec.scheduling.step_costs import (
    LEAST_PROMPT_ROWS,
    Kind,
    PromptBudget,
    StepCosts,
    TimeRatios,
    TreeCosts,
)
from specdec.sizes import TreeShape

COSTS = StepCosts(
    rounds=((8, 4.0), (64, 4.4), (256, 8.0)),
    mixed=((64, 5.0), (128, 5.5), (256, 8.2), (512, 13.0), (1024, 25.0)),
    ms_per_key=1e-5,
    ms_per_pair=2e-6,
)


def test_a_step_costs_what_the_next_measured_one_does_and_beyond_them_by_the_row():
    assert COSTS.round_ms(9, 0) == 4.4
    assert COSTS.mixed_ms(128, 0, 0) == 5.5
    assert COSTS.mixed_ms(129, 10**5, 10**6) == 8.2 + 1.0 + 2.0
    assert COSTS.mixed_ms(768, 0, 0) == 25.0  # padded to 1,024
    assert COSTS.mixed_ms(2048, 0, 0) == 50.0


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
    limit = slowdown * COSTS.round_ms(num_verify_rows, num_keys)

    def fits(rows: int) -> bool:
        pairs = rows * start + rows * rows // 2
        return COSTS.mixed_ms(num_verify_rows + rows, num_keys, pairs) <= limit

    rows = budget.rows(num_verify_rows, num_keys, start)
    assert rows >= LEAST_PROMPT_ROWS
    assert fits(rows) or not fits(LEAST_PROMPT_ROWS)
    # all that a larger step holds
    sizes = [size - num_verify_rows for size in COSTS.sizes_above(num_verify_rows + rows)]
    assert not any(map(fits, sizes))


def test_a_long_wait_lets_more_ride():
    rows = [PromptBudget(costs=COSTS, slowdown=each).rows(128, 0, 0) for each in (1.0, 1.9, 3.4)]
    assert rows == [LEAST_PROMPT_ROWS, 384, 896]


def test_as_many_ride_as_arrive_on_average_whatever_the_wait():
    budget = PromptBudget(costs=COSTS, slowdown=1.5)
    assert [budget.rows(256, 0, 0, each) for each in (0, 64, 65, 256, 257)] == [
        *(LEAST_PROMPT_ROWS, LEAST_PROMPT_ROWS),
        *(256, 256, 768),
    ]


@pytest.mark.parametrize(
    "verified, requests, left, kept",
    [
        (200, 50, [40, 20], 56),  # 260 rows: 4 of them would pay for 252 of padding
        (200, 50, [40, 16], 56),  # a size is full
        (200, 50, [40, 272], 312),
        (200, 1, [40, 20], 60),  # a request alone would go without half of the rounds
        (200, 50, [57, 3], 60),  # the first prompt is due
        (8, 4, [40, 20], 60),  # the larger size costs little more
        (30, 10, [20], 20),  # a size is below that of the rows that verify
        (1000, 50, [400], 400),  # beyond the largest each row counts
    ],
)
def test_rows_that_would_begin_another_size_wait_where_that_saves_time(
    verified, requests, left, kept
):
    budget = PromptBudget(costs=COSTS, slowdown=1.5)
    assert budget.fitting(verified, requests, left) == kept


@pytest.mark.parametrize(
    "verified, requests, left, num_due, kept",
    [
        (200, 100, [57, 3], 0, 56),  # what fills a size rides
        (200, 100, [57, 3], 1, 60),
        (200, 50, [40, 272], 0, 56),  # a size is full, but another cheaper by more
        (100, 50, [20, 212], 0, 28),  # two sizes less
        (100, 50, [20, 212], 2, 232),
        (100, 2, [20, 40], 0, 60),  # of few requests each has a large part of a step
        (256, 100, [30], 0, 30),  # no smaller step would have room
    ],
)
def test_among_many_requests_more_may_wait(verified, requests, left, num_due, kept):
    budget = PromptBudget(costs=COSTS, slowdown=1.5)
    assert budget.fitting(verified, requests, left, num_due, is_patient=True) == kept


@pytest.mark.parametrize(
    "verified, requests, ends, kept",
    [
        (256, 50, 3, 253),
        (256, 50, 0, 256),
        (255, 50, 3, 253),  # one end has room
        (250, 50, 3, 250),  # all have
        (256, 254, 3, 254),  # a request keeps the row of its last token
        (256, 50, 5, 256),  # too many drafts for the tiles that it saves
        (64, 5, 1, 64),  # few rows cost as much as none
        (1000, 50, 3, 1000),  # beyond the largest each row counts
    ],
)
def test_a_few_drafts_give_way_to_prompts_that_end(verified, requests, ends, kept):
    budget = PromptBudget(costs=COSTS, slowdown=1.5)
    assert budget.verified(verified, requests, ends) == kept


def test_times_are_compared_by_load_prompts_and_drafts():
    ratios = TimeRatios()
    for _ in range(300):
        ratios.add(40, False, Kind.CHAIN, 1.25)
        ratios.add(20, False, Kind.PLAIN, 1.5)
        ratios.add(40, True, Kind.PLAIN, 1000.0)  # an outlier counts as twice as long
    assert ratios.of(63, False) == (1.0, 1.25)
    assert ratios.of(32, True) == (2.0, 1.0)
    assert ratios.of(31, False) == (1.5, 1.0)
    assert ratios.of(31, True) == ratios.of(64, True) == (1.0, 1.0)


def test_steps_that_are_not_run_are_forgotten_slowly():
    ratios = TimeRatios()
    for _ in range(100):
        ratios.add(40, False, Kind.PLAIN, 1.5)
    for _ in range(100):
        ratios.add(40, False, Kind.CHAIN, 1.0)
    assert 1.35 < ratios.of(40, False)[0] < 1.45
    for _ in range(1500):
        ratios.add(40, False, Kind.CHAIN, 1.0)
    assert ratios.of(40, False) == (1.03125, 1.0)


def test_one_step_that_took_long_moves_a_ratio_little():
    ratios = TimeRatios()
    ratios.add(1, False, Kind.CHAIN, 50.0)
    assert ratios.of(1, False)[1] < 1.15
    for _ in range(200):
        ratios.add(1, False, Kind.CHAIN, 1.0)
    ratios.add(1, False, Kind.CHAIN, 50.0)
    assert ratios.of(1, False)[1] < 1.04


def test_trees_take_as_many_times_as_long_as_chains_until_one_was_timed():
    ratios = TimeRatios()
    for _ in range(300):
        ratios.add(4, False, Kind.CHAIN, 1.5)
        ratios.add(4, False, Kind.PLAIN, 1.1)
    assert ratios.of_trees(4, False) == pytest.approx(1.5, abs=0.01)
    for _ in range(30):
        ratios.add(4, False, Kind.TREE, 1.2)
    assert 1.2 < ratios.of_trees(4, False) < 1.35
    assert ratios.of_trees(4, True) == 1.0


def test_a_round_of_trees_takes_the_time_of_the_levels_that_run():
    costs = TreeCosts(
        all_levels=((2, 9.0), (8, 12.0)),
        one_level=((2, 5.0), (8, 6.0)),
        shape=TreeShape(num_levels=5, top_k=4, num_nodes=15),
    )
    assert [costs.ms(n, 1) for n in (1, 2, 3)] == [5.0, 5.0, 6.0]
    assert [costs.ms(1, levels) for levels in (2, 3.5, 5)] == [6.0, 7.5, 9.0]
    assert replace(costs, one_level=()).ms(8, 1) == 12.0
