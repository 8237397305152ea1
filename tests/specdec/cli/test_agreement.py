"""What `specdec verify` concludes from figures."""

import pytest

from specdec.cli.verify import Agreement, count_equal, judge
from specdec.requests.stats import SpeculationStats


def agreement(*num_agreeing: int, num_repeated: int | None = None) -> Agreement:
    repeated = num_agreeing[0] if num_repeated is None else num_repeated
    return Agreement(
        num_agreeing=num_agreeing, num_repeated=repeated, acceptance=SpeculationStats()
    )


@pytest.mark.parametrize("first, works", [(24, False), (25, True), (80, True)])
def test_less_than_a_quarter_at_position_1_does_not_work(first, works):
    verdict = judge(agreement(100, first, first))

    assert verdict.works == works
    assert bool(verdict.causes) != works


def test_a_fall_at_position_2_points_at_the_recycled_state():
    verdict = judge(agreement(100, 80, 20))

    assert verdict.works
    assert "falls to 25% at position 2" in verdict.text
    assert "recycled" in verdict.causes[0]


def test_a_target_that_does_not_repeat_itself_fails_whatever_the_draft():
    verdict = judge(agreement(100, 80, 70, num_repeated=99))

    assert not verdict.works
    assert "1 of 100" in verdict.text


def test_rates_are_conditional_and_none_over_nothing():
    assert agreement(10, 5, 0, 0).rates == [0.5, 0.0, None]


@pytest.mark.parametrize(
    "drafts, count", [([], 0), ([1], 1), ([1, 2, 3], 3), ([1, 9, 3], 1), ([9, 2, 3], 0)]
)
def test_count_equal_stops_at_the_first_difference(drafts, count):
    assert count_equal(drafts, [1, 2, 3]) == count
