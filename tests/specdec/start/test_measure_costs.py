"""What steps cost, as an engine on a GPU measures it at its start."""

import itertools
import logging
import re

import pytest

from specdec import LLM
from specdec.scheduling.step_costs import LEAST_PROMPT_ROWS
from specdec.start.measure_costs import _spread


def test_a_few_sizes_stand_for_many():
    assert _spread(range(1, 101), 4) == [1, 34, 67, 100]
    assert _spread([8, 16], 6) == [8, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
def test_costs_are_of_the_steps_that_are_captured(k, caplog):
    caplog.set_level(logging.INFO, "specdec")
    speculation = {"model": "demo", "num_speculative_tokens": k} if k else None
    llm = LLM("demo", speculation, max_num_seqs=16, num_kv_blocks=200)
    costs = llm.engine.scheduler.budget.costs
    rounds, mixed = ([rows for rows, _ in each] for each in (costs.rounds, costs.mixed))
    assert rounds == ([16] if k == 0 else [16, 32, 64])
    assert set(mixed) <= set(llm.engine.runner.graphs.target.prefill.sizes.tokens)
    assert mixed[0] == LEAST_PROMPT_ROWS
    assert all(a < b for a, b in itertools.pairwise(rounds))
    assert all(0.05 < ms < 1000 for _, ms in (*costs.rounds, *costs.mixed))
    assert min(costs.ms_per_key, costs.ms_per_pair) >= 0
    captured = re.search(r"in graphs up to (\d+) rows", caplog.text)
    assert captured
    assert int(captured[1]) == mixed[-1]


@pytest.mark.gpu
def test_the_smallest_engine_is_measured_too():
    llm = LLM("demo", max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2, num_kv_blocks=1)
    assert [rows for rows, _ in llm.engine.scheduler.budget.costs.rounds] == [1]
