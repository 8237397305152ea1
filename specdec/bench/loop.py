"""Closed loops: B requests run at all times, and when one ends the next begins.

The requests of the first generation stop at staggered lengths, so that ends never come in waves.
The window begins when as many have ended, and holds whole generations: as many prompts as
completions; of few requests at a time it has more of them, since texts differ. Prompts are 25 to
160 tokens of the pair's, answers --max-tokens. Request i is the same in every loop, so that outputs
are compared with those of plain decoding. The engine has the graphs that users get, and room for
the largest load.

A ramp is a load that doubles from one request to the largest batch and halves again; at each stage
as many requests end as run. It is judged as a whole.

The suite noise: auto is to lose nothing by a useless draft, and to find out soon when it is useful.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch

from graphs.frozen_heap import frozen_heap
from specdec.bench.bench import Bench
from specdec.bench.pair import PLAIN, EngineSpec, joined
from specdec.bench.report import Row, percentile
from specdec.bench.serving import Job
from specdec.bench.timing import Spread
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats
from specdec.scheduling.statistics import PlannerStatistics
from specdec.sizes import MAX_TREE_REQUESTS
from specdec.start.speculation import Drafting
from weights.load import LoadedEagle

GENERATIONS = 8  # of the window, at least
LEAST_REQUESTS = 32  # of the window
PROMPT_LENGTHS = (25, 160)
TEMPERATURES = (0.0, 0.8)
RAMPS = 3  # runs of a ramp
STEPS_WITH_NOISE, STEPS_WITHOUT = 50, 200  # before a window of the suite noise begins
MANY = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a loop measured. Times are seconds of the host's clock."""

    requests: list[Request]  # all that began, in order; the last ones were aborted
    tokens_per_second: float
    gaps: list[float]  # between two deliveries to one request
    first_tokens: list[float]  # from the arrival of each request of the window
    host_share: float | None  # of the time, in which the host did not wait for a GPU's results
    stats: SpeculationStats  # of the requests that began and ended in it
    planned: Row  # what an adaptive engine chose


def loop(bench: Bench) -> Iterator[Row]:
    """Run requests in a closed loop: tokens per second and waiting times, greedy and sampled.

    With --ramp the load rises from one request to the largest batch and falls again, greedily.
    """
    for drafting in bench.drafting:
        yield from (_ramp if bench.options.ramp else _loads)(bench, drafting)
        bench.pair.drop()


def _loads(bench: Bench, drafting: Drafting) -> Iterator[Row]:
    options, K = bench.options, drafting.name
    for batch, temperature in product(bench.batches, options.temperatures or TEMPERATURES):
        what = f"loop: K = {K}, batch {batch}, temperature {temperature}"
        if not bench.runs_at_once(drafting, batch, what) or not bench.has_time(what):
            continue
        engine = bench.pair.engine(engine_spec(bench, drafting))
        row: Row = {"num_speculative_tokens": K, "batch": batch, "temperature": temperature}
        for run in range(1, options.repeats + 1):
            window = run_loop(engine, jobs(bench, batch, temperature), batch)
            found = bench.outputs.difference(window.requests) or _figures(window, batch)
            yield row | {"run": run} | found


def _ramp(bench: Bench, drafting: Drafting) -> Iterator[Row]:
    K = drafting.name
    largest = max(bench.batches)
    what = f"loop: K = {K}, a ramp"
    if not bench.runs_at_once(drafting, largest, what) or not bench.has_time(what):
        return
    engine = bench.pair.engine(engine_spec(bench, drafting))
    row: Row = {"num_speculative_tokens": K, "load": f"1 to {largest} to 1", "batch": largest}
    speeds: list[float] = []
    difference: Row = {}
    before = None if engine.planner is None else engine.planner.statistics
    for _ in range(RAMPS):
        speed, requests = run_ramp(engine, jobs(bench, 0, 0.0), largest)
        speeds.append(speed)
        difference |= bench.outputs.difference(requests)
    figures = Spread.of(speeds).columns("tokens_per_second") | _planned(engine, before)
    yield row | (difference or figures)


def engine_spec(bench: Bench, drafting: Drafting) -> EngineSpec:
    """Describe an engine with room for the largest batch that it runs."""
    most = max(bench.batches)
    return EngineSpec(
        drafting=drafting,
        max_num_seqs=min(most, MAX_TREE_REQUESTS) if drafting.has_fixed_tree else most,
        max_tokens=PROMPT_LENGTHS[1] + bench.options.max_tokens,
        max_model_len=bench.options.model_len,
        has_prefill_graphs=True,
    )


def jobs(bench: Bench, batch: int, temperature: float) -> Iterator[Job]:
    """Yield jobs without an end; the first ones ask for 1 / B, 2 / B, ... of the tokens."""
    chance = random.Random(0)
    most = bench.options.max_tokens
    i = 0
    while True:
        params = SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=-(-most * (i + 1) // batch) if i < batch else most,
            ignore_eos=True,
        )
        yield joined(bench.pair.prompts, chance.randint(*PROMPT_LENGTHS), i), params
        i += 1


def run_loop(engine: Engine, jobs: Iterator[Job], batch: int, most_steps: int = MANY) -> Window:
    """Run the first generation, or some steps of it, and the window, then abort what runs.

    Collections of garbage walk over what the loop itself makes, not over the outputs of others.
    """
    running = Loop(engine, jobs)
    waits = engine.runner.results.waits
    with frozen_heap():
        running.run(batch, batch if most_steps == MANY else MANY, most_steps)
        del running.gaps[:]
        before = None if engine.planner is None else engine.planner.statistics
        num_before, num_tokens, waited = len(running.requests), running.num_tokens, waits.seconds
        began = time.monotonic()
        running.run(batch, num_measured(batch))
        seconds = time.monotonic() - began
        waited = waits.seconds - waited
        num_tokens = running.num_tokens - num_tokens
        engine.abort_all()
        engine.drain()
    latencies = (each.stats.time_to_first_token for each in running.requests[num_before:])
    ended = (each for each in running.requests if each.finish and each.finish.reason != "abort")
    done = [each.stats for each in ended if each.stats.arrival_time >= began]
    return Window(
        requests=running.requests,
        tokens_per_second=num_tokens / seconds,
        gaps=running.gaps.tolist(),
        first_tokens=[latency for latency in latencies if latency is not None],
        host_share=1 - waited / seconds if engine.runner.device.type == "cuda" else None,
        stats=SpeculationStats.merged(done),
        planned=_planned(engine, before),
    )


def num_measured(batch: int) -> int:
    """Count the requests of a window."""
    return max(GENERATIONS, -(-LEAST_REQUESTS // batch)) * batch


def run_ramp(engine: Engine, jobs: Iterator[Job], largest: int) -> tuple[float, list[Request]]:
    """Run a whole ramp; return its tokens per second and all requests."""
    rising = [1 << i for i in range(largest.bit_length())]
    running = Loop(engine, jobs)
    with frozen_heap():
        began = time.monotonic()
        for level in (*rising, *reversed(rising[:-1])):
            running.run(level, level)
        running.run(0, running.num_running)
        return running.num_tokens / (time.monotonic() - began), running.requests


class Loop:
    """Steps an engine, and begins requests as others end."""

    def __init__(self, engine: Engine, jobs: Iterator[Job]) -> None:
        self.engine = engine
        self.requests: list[Request] = []  # in the order in which they began
        self.gaps = array("d")  # no collection of garbage walks over it
        self.num_running = 0
        self._jobs = jobs
        self._delivered: dict[str, float] = {}  # when, by request id

    @property
    def num_tokens(self) -> int:
        """Count the tokens that all requests have so far."""
        return sum(len(request.token_ids) for request in self.requests)

    def run(self, level: int, num_ends: int = MANY, most_steps: int = MANY) -> None:
        """Run until so many requests or steps have ended. level: how many run at a time."""
        self._fill(level)
        while num_ends > 0 and most_steps > 0:
            changed = self.engine.step()
            most_steps -= 1
            now = time.monotonic()
            for request in changed:
                before = self._delivered.get(request.request_id)
                if before is not None:
                    self.gaps.append(now - before)
                self._delivered[request.request_id] = now
            ended = sum(request.is_finished for request in changed)
            num_ends -= ended
            self.num_running -= ended
            self._fill(level)

    def _fill(self, level: int) -> None:
        count = level - self.num_running
        self.requests += self.engine.add_requests([next(self._jobs) for _ in range(count)])
        self.num_running += max(count, 0)


def _planned(engine: Engine, before: PlannerStatistics | None) -> Row:
    """Say what an adaptive engine chose since `before`, and how well it foresaw the outcome."""
    if engine.planner is None or before is None:
        return {}
    stats = engine.planner.statistics.since(before)
    rounds = max(stats.num_rounds, 1)
    return {
        "rows_a_round": stats.num_rows / rounds,
        "rows_wasted": stats.wasted_share,
        "levels_a_round": stats.num_levels / rounds,
        "tree_rounds": stats.tree_share,
        # levels x width x nodes: the share of the rounds
        "shapes": {"x".join(map(str, s)): n / rounds for s, n in stats.rounds.most_common(4)},
        "measured_over_predicted": stats.measured_tokens / max(stats.predicted_tokens, 1.0),
        "ms_over_predicted": stats.measured_ms / max(stats.predicted_ms, 1e-9),
    }


def _figures(window: Window, batch: int) -> Row:
    drafted = window.stats.num_drafted_tokens
    return {
        "tokens_per_second": window.tokens_per_second,
        "per_user": window.tokens_per_second / batch,
        "mean_acceptance_length": window.stats.mean_acceptance_length,
        "drafts_wasted": 1 - window.stats.num_accepted_tokens / drafted if drafted else None,
        "first_token_ms_p50": percentile(window.first_tokens, 50),
        "first_token_ms_p99": percentile(window.first_tokens, 99),
        "gap_ms_p50": percentile(window.gaps, 50),
        "gap_ms_p99": percentile(window.gaps, 99),
        "host_share": window.host_share,
        **window.planned,
    }


def noise(bench: Bench) -> Iterator[Row]:
    """Run auto with a draft of random weights beside plain decoding, and with its own again.

    Tokens per second are taken 50 steps after a loop with random weights began, and 200 after each
    of two loops with its own began. The row also says what was planned with random weights.
    """
    bench.pair.drop()
    eagle = bench.pair.eagle
    if eagle is None:
        return
    auto = bench.auto(eagle)
    if auto.is_adaptive and bench.pair.device.type != "cuda":  # costs are measured with graphs
        return
    for batch, temperature in product(bench.batches, bench.options.temperatures or (0.0,)):
        if bench.has_time(f"noise: batch {batch}, temperature {temperature}"):
            row: Row = {"num_speculative_tokens": auto.name, "batch": batch}
            row["temperature"] = temperature
            yield row | _noisy_figures(bench, eagle, auto, batch, temperature)
    bench.pair.drop()


def _noisy_figures(
    bench: Bench, eagle: LoadedEagle, auto: Drafting, batch: int, temperature: float
) -> Row:
    speeds: dict[str, float] = {}
    choices: Row = {}
    for name, drafting, num_steps in (
        ("plain", PLAIN, STEPS_WITH_NOISE),
        ("with_noise", auto, STEPS_WITH_NOISE),
        ("again", auto, STEPS_WITHOUT),
        ("later", auto, STEPS_WITHOUT),
    ):
        has_noise = name == "with_noise"
        engine = bench.pair.engine(engine_spec(bench, drafting))
        with random_weights(eagle) if has_noise else nullcontext():
            window = run_loop(engine, jobs(bench, batch, temperature), batch, num_steps)
        if difference := bench.outputs.difference(window.requests):
            return difference
        speeds[name] = window.tokens_per_second
        if has_noise:
            choices = {f"noise_{key}": value for key, value in window.planned.items()}
    return {
        **speeds,
        "noise_over_plain": speeds["with_noise"] / speeds["plain"],
        "again_over_best": speeds["again"] / max(speeds["again"], speeds["later"]),
        **choices,
    }


@contextmanager
def random_weights(eagle: LoadedEagle) -> Iterator[None]:
    """Overwrite the draft's matrices by noise of their mean size, in place, and restore them."""
    kept = {name: x.clone() for name, x in eagle.tensors.items() if x.ndim == 2}
    generator = torch.Generator(next(iter(kept.values())).device).manual_seed(0)
    try:
        for name, x in kept.items():
            eagle.tensors[name].normal_(0, x.float().std().item(), generator=generator)
        yield
    finally:
        for name, x in kept.items():
            eagle.tensors[name].copy_(x)
