"""What the prompt budget brings under a steady load: tokens per second, and who waits for how long.

The loop on an H200 (2026-11-22, K = 3, greedy) made 11,807
tokens per second with 32 requests and 15,813 with 64; first tokens came after 2.0 mean steps, and
after 3.5 and 3.9 at p99.
"""

import statistics
from functools import cache

import pytest

from specdec.config import MAX_PROMPT_SLOWDOWN
from specdec.scheduling import prompts
from specdec.scheduling.step_costs import PromptBudget
from tests.specdec.scheduling.loop_world import COSTS, LoopWorld

NUM_STEPS = 800
MEASURED = {32: 11_807, 64: 15_813}


class AllAtOnce(PromptBudget):
    """No prompt waits."""

    def rows(self, *_):
        return 8192

    def fitting(self, num_verify_rows, num_requests, left, num_due=1, is_patient=False):
        return sum(left)


@cache
def figures(num_requests, slowdown=MAX_PROMPT_SLOWDOWN, kind=PromptBudget):
    return LoopWorld(num_requests, kind(costs=COSTS, slowdown=slowdown)).run(NUM_STEPS)


def percentile(values, percent):
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@pytest.mark.parametrize("num_requests", MEASURED)
def test_the_world_is_about_the_measured_one(num_requests):
    found = figures(num_requests).tokens_per_second
    assert found == pytest.approx(MEASURED[num_requests], rel=0.05)


@pytest.mark.parametrize("num_requests", [16, 32, 64])
def test_first_tokens_come_after_two_steps_and_seldom_four(num_requests):
    found = figures(num_requests).first_tokens
    assert len(found) > 100
    assert percentile(found, 50) < 2.4
    assert percentile(found, 99) < 4.3


@pytest.mark.parametrize("num_requests, most", [(32, 3), (64, 3), (128, 4)])
def test_hardly_any_request_waits_for_more_steps_than_pass_it_over(num_requests, most):
    """The step on its way, the one with its prompt, and one that passed it over; of many two."""
    steps = figures(num_requests).first_steps
    ordered = sorted(steps)
    assert ordered[-(-len(steps) // 2) - 1] == 2
    assert ordered[-(-99 * len(steps) // 100) - 1] == most


@pytest.mark.parametrize("num_requests, share", [(96, 1.02), (128, 1.01)])
def test_among_many_prompts_wait_for_steps_that_have_room(monkeypatch, num_requests, share):
    ours = figures(num_requests).tokens_per_second
    monkeypatch.setattr(prompts, "IMPATIENT", num_requests)
    world = LoopWorld(num_requests, PromptBudget(costs=COSTS, slowdown=MAX_PROMPT_SLOWDOWN))
    assert ours > share * world.run(NUM_STEPS).tokens_per_second


@pytest.mark.parametrize("num_requests", [32, 64])
def test_waiting_prompts_cost_no_throughput_and_keep_gaps_short(num_requests):
    ours, other = figures(num_requests), figures(num_requests, kind=AllAtOnce)
    assert ours.tokens_per_second > 0.995 * other.tokens_per_second
    assert percentile(ours.gaps, 99) < 0.9 * percentile(other.gaps, 99)


def test_the_slowdown_is_what_first_tokens_and_deliveries_share():
    strict, usual = figures(64, slowdown=1.2), figures(64)
    assert percentile(strict.first_tokens, 50) > 1.2 * percentile(usual.first_tokens, 50)
    assert percentile(strict.gaps, 99) < percentile(usual.gaps, 99)
