"""Closed loops: B requests run at all times, and when one ends the next begins.

The requests of the first generation stop at staggered lengths, so that ends never come in waves.
The window begins when as many have ended, and holds whole generations: as many prompts as
completions; of few requests at a time it has more of them, since texts differ. Prompts are 25 to
160 tokens of the pair's, answers --max-tokens. Request i is the same in every loop, so that outputs
are compared with those of plain decoding. The engine has the graphs that users get, and room for
the largest load.

A ramp is a load that doubles from one request to the largest batch and halves again; at each stage
as many requests end as run. It is judged as a whole.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from graphs.frozen_heap import frozen_heap
from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec, turned
from specdec.bench.report import Row, nearest_rank, percentile
from specdec.bench.serving import Job, first_difference
from specdec.bench.timing import Spread
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats
from specdec.scheduling.row_planner import PlannerStatistics
from specdec.start.speculation import Drafting
from specdec.stepping.results import HostWaits

GENERATIONS = 8  # of the window, at least
LEAST_REQUESTS = 32  # of the window
PROMPT_LENGTHS = (25, 160)
TEMPERATURES = (0.0, 0.8)
RAMPS = 3  # runs of a ramp
MANY = sys.maxsize

Outputs = dict[tuple[float, int], list[int]]  # token ids by temperature and request


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a loop measured. Times are seconds of the host's clock."""

    requests: list[Request]  # all that began, in order; the last ones were aborted
    tokens_per_second: float
    gaps: list[float]  # between two deliveries to one request
    first_tokens: list[float]  # from the arrival of each request of the window
    first_steps: list[int]  # of the engine, that each of them waited for
    host_share: float | None  # of the time, in which the host did not wait for a GPU's results
    stats: SpeculationStats  # of the requests that began and ended in it


def loop(bench: Bench) -> Iterator[Row]:
    """Run requests in a closed loop: tokens per second and waiting times, greedy and sampled.

    With --ramp the load rises from one request to the largest batch and falls again, greedily.
    """
    return _ramps(bench) if bench.options.ramp else _loads(bench)


def _loads(bench: Bench) -> Iterator[Row]:
    plain: Outputs = {}
    batches = bench.options.batches
    for drafting in bench.drafting:
        K = drafting.name
        spec = engine_spec(bench, drafting)
        for batch, temperature in product(batches, bench.options.temperatures or TEMPERATURES):
            if not bench.has_time(f"loop: K = {K}, batch {batch}, temperature {temperature}"):
                continue
            engine = bench.pair.engine(spec)
            for run in range(1, bench.options.repeats + 1):
                before = planner_statistics(engine)
                window = run_loop(engine, jobs(bench, batch, temperature), batch)
                found = compared(window.requests, temperature, plain) or _figures(window, batch)
                yield (
                    {
                        "num_speculative_tokens": K,
                        "batch": batch,
                        "temperature": temperature,
                        "run": run,
                    }
                    | found
                    | planned(engine, before)
                )
        bench.pair.drop()


def _ramps(bench: Bench) -> Iterator[Row]:
    plain: Outputs = {}
    for drafting in bench.drafting:
        K = drafting.name
        if bench.has_time(f"loop: K = {K}, a ramp"):
            engine = bench.pair.engine(engine_spec(bench, drafting))
            largest = max(bench.options.batches)
            row: Row = {"num_speculative_tokens": K, "load": f"1 to {largest} to 1"}
            row["batch"] = largest
            speeds = []
            before = planner_statistics(engine)
            for _ in range(RAMPS):
                speed, requests = run_ramp(engine, jobs(bench, 0, 0.0), largest)
                speeds.append(speed)
                row |= compared(requests, 0.0, plain) or {}
            spread = Spread.of(speeds)
            figures = {"tokens_per_second": spread.median, "low": spread.low, "high": spread.high}
            yield row if "refused" in row else row | figures | planned(engine, before)
            bench.pair.drop()


def engine_spec(bench: Bench, drafting: Drafting) -> EngineSpec:
    """Describe an engine with room for the largest batch."""
    return EngineSpec(
        num_speculative_tokens=drafting.num_tokens,
        is_adaptive=drafting.is_adaptive,
        tree=drafting.tree,
        max_num_seqs=max(*bench.options.batches, bench.options.max_num_seqs or 1),
        max_tokens=PROMPT_LENGTHS[1] + bench.options.max_tokens,
        max_model_len=bench.options.model_len,
        has_prefill_graphs=True,
    )


def jobs(bench: Bench, batch: int, temperature: float) -> Iterator[Job]:
    """Yield jobs without an end; the first ones ask for 1 / B, 2 / B, ... of the tokens."""
    chance = random.Random(0)
    prompts = bench.pair.prompts
    most = bench.options.max_tokens
    i = 0
    while True:
        params = SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=-(-most * (i + 1) // batch) if i < batch else most,
            ignore_eos=True,
        )
        yield turned(prompts, i, chance.randint(*PROMPT_LENGTHS)), params
        i += 1


def run_loop(engine: Engine, jobs: Iterator[Job], batch: int) -> Window:
    """Run the first generation and the window, then abort what runs.

    Collections of garbage walk over what the loop itself makes, not over the outputs of others.
    """
    running = Loop(engine, jobs)
    with frozen_heap():
        running.run(batch, batch)
        return measured(running, batch, num_measured(batch))


def measured(running: "Loop", batch: int, num_ends: int) -> Window:
    """Run on until so many requests have ended, then abort what runs."""
    del running.gaps[:]
    num_before = len(running.requests)
    num_tokens = running.num_tokens
    waits = running.waits
    waited = waits.seconds
    began = time.monotonic()
    running.run(batch, num_ends)
    seconds = time.monotonic() - began
    waited = waits.seconds - waited
    num_tokens = running.num_tokens - num_tokens
    running.end()
    began_in_it = running.requests[num_before:]
    latencies = (each.stats.time_to_first_token for each in began_in_it)
    steps = (running.first_steps.get(each.request_id) for each in began_in_it)
    ended = (each for each in running.requests if each.finish and each.finish.reason != "abort")
    done = [each.stats for each in ended if each.stats.arrival_time >= began]
    return Window(
        requests=running.requests,
        tokens_per_second=num_tokens / seconds,
        gaps=running.gaps.tolist(),
        first_tokens=[latency for latency in latencies if latency is not None],
        first_steps=[count for count in steps if count is not None],
        host_share=1 - waited / seconds if running.device.type == "cuda" else None,
        stats=SpeculationStats.merged(done),
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
        self.requests: list[Request] = []  # in the order in which they began
        self.gaps = array("d")  # no collection of garbage walks over it
        self.first_steps: dict[str, int] = {}  # until the first token, by request id
        self.num_running = 0
        self._engine = engine
        self._jobs = jobs
        self.num_steps = 0
        self._began: dict[str, int] = {}  # after how many steps, by request id
        self._delivered: dict[str, float] = {}  # when, by request id

    @property
    def device(self) -> torch.device:
        return self._engine.runner.device

    @property
    def waits(self) -> HostWaits:
        return self._engine.runner.results.waits

    @property
    def num_tokens(self) -> int:
        """Count the tokens that all requests have so far."""
        return sum(len(request.token_ids) for request in self.requests)

    def run(self, level: int, num_ends: int = MANY, most_steps: int = MANY) -> None:
        """Run until so many requests or steps have ended. level: how many run at a time."""
        self._fill(level)
        last_step = self.num_steps + most_steps
        while num_ends > 0 and self.num_steps < last_step:
            changed = self._engine.step()
            self.num_steps += 1
            now = time.monotonic()
            for request in changed:
                name = request.request_id
                if name in self._delivered:
                    self.gaps.append(now - self._delivered[name])
                else:
                    self.first_steps[name] = self.num_steps - self._began[name]
                self._delivered[name] = now
            ended = sum(request.is_finished for request in changed)
            num_ends -= ended
            self.num_running -= ended
            self._fill(level)

    def end(self) -> None:
        """Abort what runs."""
        self._engine.abort_all()
        self._engine.drain()

    def _fill(self, level: int) -> None:
        self._begin([next(self._jobs) for _ in range(level - self.num_running)])

    def _begin(self, jobs: Sequence[Job]) -> None:
        requests = self._engine.add_requests(jobs)
        self._began |= {request.request_id: self.num_steps for request in requests}
        self.requests += requests
        self.num_running += len(requests)


def compared(requests: Sequence[Request], temperature: float, plain: Outputs) -> Row | None:
    """Compare each request with the longest output that is known of it; a row if they differ."""
    for i, request in enumerate(requests):
        known = plain.get((temperature, i), [])
        both = min(len(known), len(request.token_ids))
        difference = first_difference([request.token_ids[:both]], [known[:both]])
        if difference is not None:
            return {"refused": f"request {i}: {difference}"}
        if len(request.token_ids) > len(known):
            plain[temperature, i] = list(request.token_ids)
    return None


def planner_statistics(engine: Engine) -> PlannerStatistics | None:
    """Read the planner's counters; None where the number of drafts is fixed."""
    return None if engine.planner is None else engine.planner.statistics


def planned(engine: Engine, before: PlannerStatistics | None) -> Row:
    """Say what an adaptive engine chose since `before`, and how well it foresaw the outcome."""
    now = planner_statistics(engine)
    if now is None or before is None:
        return {}
    stats = now.since(before)
    rounds = max(stats.num_rounds, 1)
    tokens = max(stats.predicted_tokens, 1.0)
    return {
        "rows_a_round": stats.num_rows / rounds,
        "rows_wasted": stats.wasted_share,
        "levels_a_round": stats.num_levels / rounds,
        "tree_rounds": stats.tree_share,
        "measured_over_predicted": stats.measured_tokens / tokens,
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
        "first_token_steps_p50": nearest_rank(window.first_steps, 50),
        "first_token_steps_p99": nearest_rank(window.first_steps, 99),
        "gap_ms_p50": percentile(window.gaps, 50),
        "gap_ms_p99": percentile(window.gaps, 99),
        "host_share": window.host_share,
    }
