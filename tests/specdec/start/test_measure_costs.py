"""What steps cost, as an engine on a GPU measures it at its start."""

import itertools
import logging
import re
import time
from functools import partial

import pytest

from specdec import LLM
from specdec.kernels.tile_shapes import row_class
from specdec.scheduling.costs import LEAST_PROMPT_ROWS, StepCosts
from specdec.sizes import PLAIN, chain
from specdec.start import step_times
from specdec.start.measure_costs import AS_NEXT, NEVER, measure_costs, measure_round_costs
from specdec.start.step_times import apart, as_rounds, between
from specdec.step import Acts
from tests.block_pair import write_bigrams, write_parallel
from tests.shared_rows import rows_are_shared

# of rounds on an H200, by classes of rows
ROUND_MS = {
    16: 4.5,
    32: 4.6,
    64: 4.8,
    128: 5.1,
    160: 5.7,
    192: 6.3,
    256: 7.2,
    320: 8.4,
    384: 9.6,
    448: 10.6,
    512: 11.6,
}
MS_PER_KEY, MS_PER_PAIR = 1e-3, 1e-5


def test_many_rows_cost_what_the_graph_does_that_holds_them():
    measured = ((256, 7.0), (512, 11.0), (1024, 21.0), (2048, 45.0))
    found = between(measured, [640, 768, 1024, 1536, 2048, 4096])
    assert found == (
        *measured[:2],
        (640, 13.5),
        (768, 16.0),
        measured[2],
        (1536, 33.0),
        measured[3],
    )
    costs = StepCosts(rounds=measured, mixed=found)
    assert [costs.mixed_ms(n) for n in (300, 513, 700, 1025)] == [11.0, 13.5, 16.0, 33.0]


def test_between_two_sizes_a_step_costs_what_similar_ones_do_and_the_difference():
    rounds = ((16, 4.0), (32, 5.0), (60, 5.5), (128, 8.0))
    found = between(((32, 5.5), (128, 9.0)), (16, 32, 64, 100, 128), as_rounds(rounds))
    assert found == ((32, 5.5), (64, 5.5 + 2 / 3), (100, 8 + 0.5 + 0.5 * 68 / 96), (128, 9.0))


def test_beyond_the_largest_round_a_step_costs_what_its_neighbours_do():
    """With few requests rounds have few rows; how long more of them would take is not known."""
    found = between(((64, 5.0), (256, 7.0)), (64, 128, 160, 256), as_rounds(((64, 4.8), (72, 5.1))))
    assert [rows for rows, _ in found] == [64, 128, 160, 256]
    assert [ms for _, ms in found] == pytest.approx([5.0, 5.3 + 1.7 / 3, 5.3 + 1.7 / 2, 7.0])


def test_an_outlier_makes_no_step_take_less_than_nothing():
    """Another process had the GPU while rounds of 16 rows were measured."""
    rounds = as_rounds(((16, 30.0), (32, 4.0), (64, 4.2)))
    assert between(((16, 3.8), (64, 4.4)), (16, 32, 64), rounds) == (
        (16, 3.8),
        (32, 3.8),
        (64, 4.4),
    )


def test_sizes_that_are_measured_lie_apart():
    assert apart([64, 128, 160, 192, 256, 320, 1000], 2) == [64, 128, 256, 1000]
    assert apart([16, 32, 64, 128, 256], 4) == [16, 64, 256]
    assert apart([8], 2) == [8]


class Device:
    """Its clock; steps take as long as a table says, and the first run of a short one 1 ms more."""

    def __init__(self, runner):
        self.runner = runner
        self.now = 0.0
        self.log = []  # "run" and "wait", in order
        self.known = set()
        self.beside_prompts = set()  # what such steps draft

    def run(self, acts, step):
        self.log.append("run")
        self.now += self.ms(step)
        computed = self.runner.state.num_computed_tokens
        self.now += sum(MS_PER_KEY * int(computed[row]) for row in step.state_rows if row >= 0)
        self.now += sum(MS_PER_PAIR * part.length * part.start for part in step.parts)
        sizes = (step.num_reqs, step.num_tokens, bool(step.parts), step.next_shape.is_wide)
        if step.num_tokens <= 64 and sizes not in self.known:
            self.now += 1.0
        self.known.add(sizes)
        self.beside_prompts |= {step.next_shape} if step.parts else set()
        if step.proposes:
            acts.decode_draft(step)

    def ms(self, step):
        if step.parts:
            return mixed_ms(step.num_tokens)
        return round_ms(step.num_tokens) - 0.25 * (step.next_shape == PLAIN)

    def draft(self, step):
        if step.passes.draft_decode is None:
            return
        if self.runner.sizes.block_rows:
            self.now += block_ms(step.next_shape.levels, step.num_reqs)
            return
        level = 0.125 if self.runner._stops_below > 1 else level_ms(step.num_reqs)
        self.now += level * (step.next_shape.levels - 1)


def round_ms(rows):
    return ROUND_MS[row_class(rows)]


def mixed_ms(rows):
    """As a round, and somewhat more; in proportion where each row costs."""
    many = max(rows - 512, 0)
    return round_ms(rows - many) + 0.5 + 1e-3 * (rows - many) + many / 40


def level_ms(num_reqs):
    return 0.25 + 1e-3 * num_reqs


def block_ms(num_tokens, num_reqs):
    return 0.5 + 0.01 * num_tokens * num_reqs


class Mark:
    """What a device's clock showed when it got there."""

    def __init__(self, device):
        self._device, self.at = device, device.now

    def synchronize(self):
        self._device.log.append("wait")

    def elapsed_time(self, later):
        return later.at - self.at


@pytest.fixture
def measured(monkeypatch):
    """measured(max_num_seqs, draft="demo"): an engine's costs on such a device, and the device."""

    def measure(count, draft="demo"):
        draft = {"model": draft, "num_speculative_tokens": "auto"}
        with rows_are_shared():
            llm = LLM("demo", draft, max_num_seqs=count, max_model_len=1024, device="cpu")
        runner = llm.engine.runner
        device = Device(runner)
        monkeypatch.setattr(step_times, "mark", lambda: Mark(device))
        monkeypatch.setattr(Acts, "run", lambda acts, step: device.run(acts, step))
        monkeypatch.setattr(Acts, "decode_draft", lambda _, step: device.draft(step))
        with runner.stopping_below(NEVER):
            steps = measure_costs(runner)
            return steps, measure_round_costs(runner, steps), device

    return measure


@pytest.mark.parametrize("count, most_rows", [(20, 180), (256, 512)])
def test_costs_of_steps_are_told_apart_by_rows_and_levels(measured, count, most_rows):
    steps, costs, device = measured(count)
    rows = [n for n, _ in costs.rounds]
    captured = {n for _, n in device.runner.graphs.shapes}
    assert set(rows) <= captured
    assert [row_class(n) for n in rows] == sorted({row_class(n) for n in captured} - {*AS_NEXT})
    assert rows[-1] == most_rows
    assert (costs.rounds, costs.mixed) == (steps.rounds, steps.mixed)
    assert dict(costs.rounds) == pytest.approx({n: round_ms(n) for n in rows})
    tokens = [n for n in device.runner.graphs.target.prefill.sizes.tokens if n > 512]
    assert [n for n, _ in costs.mixed if n > 512] == tokens
    # of more rows than any round has, too
    assert dict(costs.mixed) == pytest.approx({n: mixed_ms(n) for n, _ in costs.mixed})
    assert {128, 256, 320, 384, 512} <= {n for n, _ in costs.mixed}
    assert {384, 512} == {n for n, _ in costs.mixed if 320 < n <= 512}  # 448 as 512
    assert costs.mixed_ms(448) == costs.mixed_ms(512)
    assert dict(costs.level) == pytest.approx({n: level_ms(n) for n, _ in costs.level})
    assert dict(costs.plain) == pytest.approx({n: round_ms(n) - 0.25 for n, _ in costs.plain})
    assert costs.plain[-1][0] == costs.level[-1][0] == count
    assert costs.ms_per_key == pytest.approx(MS_PER_KEY, rel=0.05)
    assert steps.ms_per_pair == pytest.approx(MS_PER_PAIR)
    assert costs.skipped_ms == pytest.approx(0.125)


def test_trees_cost_what_all_their_levels_do_or_one_that_stops(measured):
    _, costs, _ = measured(256)
    tree = costs.tree
    shapes = {1: (16, 7), 2: (16, 5), 4: (16, 5), 6: (10, 5), 8: (8, 4)}
    assert [n for n, _ in tree.one_level] == [n for n, _ in tree.all_levels] == [*shapes]
    for n, expected in shapes.items():
        shape = tree.shape.of(n)
        rows_ms, further = round_ms(n * shape.num_rows), shape.num_levels - 1
        assert (shape.num_rows, further) == expected
        found = tree.ms(n, shape.num_levels)
        assert found == pytest.approx(rows_ms + further * level_ms(n), abs=0.25)
        assert tree.ms(n, 1) == pytest.approx(rows_ms + further * 0.125, abs=0.3)


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_blocks_are_priced_apart_from_rounds_by_length_and_requests(measured, tmp_path, kind):
    """The first draft of P-EAGLE is not, since its rounds make it in any case."""
    write = partial(write_bigrams, format="dflash", markov=None, confidence=None)
    if kind == "peagle":
        write = partial(write_parallel, format="p-eagle")
    _, costs, device = measured(20, str(write(tmp_path)))
    assert device.beside_prompts == {chain(1) if kind == "peagle" else PLAIN}
    assert dict(costs.rounds) == pytest.approx({n: round_ms(n) - 0.25 for n, _ in costs.rounds})
    assert dict(costs.mixed) == pytest.approx({n: mixed_ms(n) for n, _ in costs.mixed})
    assert costs.plain[-1] == (20, pytest.approx(round_ms(20) - 0.25))
    assert (costs.level, costs.skipped_ms) == ((), None)
    assert (costs.tree is None) == (kind == "peagle")
    for n, ms in costs.tree.all_levels if costs.tree else ():
        shape = costs.tree.shape.of(n)
        expected = round_ms(n * shape.num_rows) + block_ms(shape.num_levels, n)
        assert ms == pytest.approx(expected, abs=0.2)
    K = device.runner.sizes.num_speculative_tokens
    assert [length for length, _ in costs.blocks] == [-(-K // 2), K]
    for length, by_requests in costs.blocks:
        assert [n for n, _ in by_requests][-1] == 20
        expected = {n: block_ms(length, n) for n, _ in by_requests}
        assert dict(by_requests) == pytest.approx(expected)
    assert [what for what, _ in itertools.groupby(device.log)] == ["run", "wait"] * 2


def test_an_engine_of_256_requests_is_measured_by_few_runs(measured):
    """Nothing waits before all steps are launched, for either table."""
    _, _, device = measured(256)
    assert device.log.count("run") <= 40
    assert device.now < 295
    assert [what for what, _ in itertools.groupby(device.log)] == ["run", "wait"] * 2


class HostMark(Mark):
    """A moment on the host, which here computes."""

    def __init__(self):
        self.at = 1e3 * time.perf_counter()

    def synchronize(self):
        pass


@pytest.mark.parametrize(
    "k", ["auto", *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 0, "block", "peagle"))]
)
def test_every_step_that_is_measured_runs(monkeypatch, tmp_path, k):
    monkeypatch.setattr(step_times, "mark", HostMark)
    draft = {"model": "demo", "num_speculative_tokens": k}
    if k == "block":
        draft = {"model": str(write_bigrams(tmp_path, "deepspec-dspark"))}
    if k == "peagle":
        draft = {"model": str(write_parallel(tmp_path, "p-eagle"))}
    with rows_are_shared():
        runner = LLM("demo", draft, max_num_seqs=4, max_model_len=256, device="cpu").engine.runner
    with runner.stopping_below(NEVER):
        steps = measure_costs(runner)
        assert all(ms > 0 for _, ms in (*steps.rounds, *steps.mixed))
        if runner.sizes.is_adaptive:
            costs = measure_round_costs(runner, steps)
            assert all(ms > 0 for _, ms in costs.plain)
            assert all((ms > 0) == (k != 1) for _, ms in costs.level)
            has_blocks = k in ("block", "peagle")
            assert (len(costs.blocks), len(costs.level) > 0) == ((2, 0) if has_blocks else (0, 1))
            assert all(ms > 0 for _, by_requests in costs.blocks for _, ms in by_requests)
            assert (costs.tree is not None) == (k in ("auto", "block"))


@pytest.mark.gpu
def test_an_adaptive_engine_measures_its_rounds(caplog):
    caplog.set_level(logging.INFO, "specdec")
    llm = LLM("demo", {"model": "demo", "num_speculative_tokens": "auto"}, max_num_seqs=64)
    costs = llm.engine.planner._costs
    assert "a level of drafts" in caplog.text
    assert {rows for rows, _ in costs.rounds} <= {
        rows for _, rows in llm.engine.runner.graphs.shapes
    }
    assert all(0.05 < ms < 1000 for _, ms in (*costs.rounds, *costs.plain))
    assert all(0 <= ms < 10 for _, ms in costs.level)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 3])
def test_costs_are_of_the_steps_that_are_captured(k, caplog):
    caplog.set_level(logging.INFO, "specdec")
    speculation = {"model": "demo", "num_speculative_tokens": k, "adaptive": False} if k else None
    llm = LLM("demo", speculation, max_num_seqs=16, num_kv_blocks=200)
    costs = llm.engine.scheduler.prompts.budget.costs
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
    assert [rows for rows, _ in llm.engine.scheduler.prompts.budget.costs.rounds] == [1]
