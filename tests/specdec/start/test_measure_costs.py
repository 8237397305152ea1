"""What steps cost, as an engine on a GPU measures it at its start."""

import itertools
import logging
import re

import pytest

from scripts.soak import rows_are_shared
from specdec import LLM
from specdec.kernels.tile_shapes import row_class
from specdec.scheduling.step_costs import LEAST_PROMPT_ROWS, StepCosts
from specdec.start import measure_costs
from specdec.start.measure_costs import _of_sizes, _spread


def test_many_rows_cost_what_the_graph_does_that_holds_them():
    measured = ((256, 7.0), (512, 11.0), (1024, 21.0), (2048, 45.0))
    sizes = [256, 320, 384, 512, 640, 768, 1024, 1536, 2048]
    found = _of_sizes(measured, sizes)
    assert found == (
        *measured[:2],
        (640, 13.5),
        (768, 16.0),
        measured[2],
        (1536, 33.0),
        measured[3],
    )
    costs = StepCosts(rounds=measured, mixed=found)
    assert [costs.mixed_ms(n, 0, 0) for n in (300, 513, 700, 1025)] == [11.0, 13.5, 16.0, 33.0]


def test_a_few_sizes_stand_for_many():
    assert _spread(range(1, 101), 4) == [1, 34, 67, 100]
    assert _spread([8, 16], 6) == [8, 16]


@pytest.mark.parametrize("count, most_rows", [(20, 180), (256, 512)])
def test_costs_of_steps_are_told_apart_by_rows_and_levels(monkeypatch, count, most_rows):
    """A step of N rows takes N ms, a level 0.5 ms more by request, a plain one 0.25 ms less.

    A level after the stop takes 0.125 ms.
    """
    with rows_are_shared():
        draft = {"model": "demo", "num_speculative_tokens": "auto"}
        runner = LLM(
            "demo", draft, max_num_seqs=count, max_model_len=64, device="cpu"
        ).engine.runner

    def ms(runner, step):
        if step.num_levels == 0:
            return step.num_reqs - 0.25
        level = 0.125 if runner.threshold > 1 else 0.5 * step.num_reqs
        return step.num_tokens + level * (step.num_levels - 1)

    monkeypatch.setattr(measure_costs, "_ms", ms)
    monkeypatch.setattr(measure_costs, "_ms_per_key", lambda _: 0.5)
    monkeypatch.setattr(measure_costs, "_ms_per_pair", lambda _: 0.0)
    steps = measure_costs.measure_costs(runner)
    costs = measure_costs.measure_round_costs(runner, steps)
    rows = [n for n, _ in costs.verify]
    classes = [row_class(n) for n in rows]
    assert classes == sorted(set(classes))
    captured = {n for _, n in runner.graphs.shapes}
    assert set(rows) <= captured
    assert {row_class(n) for n in captured} == set(classes)
    assert rows[-1] == most_rows
    assert all(ms == n for n, ms in (*costs.verify, *costs.mixed))
    assert (costs.verify, costs.mixed) == (steps.rounds, steps.mixed)
    assert all(ms == 0.5 * n for n, ms in costs.level)
    assert all(ms == n - 0.25 for n, ms in costs.plain)
    assert costs.plain[-1][0] == costs.level[-1][0] == count
    assert costs.ms_per_key == 0.5
    assert costs.skipped_ms == 0.125
    assert runner.threshold == 0


@pytest.mark.gpu
def test_an_adaptive_engine_measures_its_rounds(caplog):
    caplog.set_level(logging.INFO, "specdec")
    llm = LLM("demo", {"model": "demo", "num_speculative_tokens": "auto"}, max_num_seqs=64)
    costs = llm.engine.planner._costs
    assert "a level of drafts" in caplog.text
    assert {rows for rows, _ in costs.verify} <= {
        rows for _, rows in llm.engine.runner.graphs.shapes
    }
    assert all(0.05 < ms < 1000 for _, ms in (*costs.verify, *costs.plain))
    assert all(0 <= ms < 10 for _, ms in costs.level)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
def test_costs_are_of_the_steps_that_are_captured(k, caplog):
    caplog.set_level(logging.INFO, "specdec")
    speculation = {"model": "demo", "num_speculative_tokens": k, "adaptive": False} if k else None
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
