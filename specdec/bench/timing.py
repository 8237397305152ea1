"""Times by a device's own clock: of calls, and of rounds in steady state and their phases."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specdec.bench.serving import greedy
from specdec.engine import Engine
from specdec.requests.params import SamplingFlags
from specdec.step import PHASES

CACHES = 256 << 20  # bytes that a GPU's caches do not hold
WARMUP = 5  # rounds
Mark = Any  # torch.cuda.Event, or seconds of the host's clock
Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Sum up several measurements: the median, the ends of the middle 80 %, and the mean."""

    median: float
    low: float
    high: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarize at least one value."""
        ordered = sorted(values)
        tail = len(ordered) // 10
        return Spread(
            median=statistics.median(ordered),
            low=ordered[tail],
            high=ordered[-1 - tail],
            mean=statistics.fmean(ordered),
        )

    def columns(self, name: str) -> dict[str, object]:
        """Make a row of the median, under this name, and the ends."""
        return {name: self.median, "low": self.low, "high": self.high}


class Clock:
    """CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Note this moment in the current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Tell the time between two marks, after `wait`."""
        is_gpu = self._device.type == "cuda"
        return float(start.elapsed_time(end) if is_gpu else 1e3 * (end - start))

    def wait(self) -> None:
        """Wait until the device has finished everything it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def repeat(self, call: Callable[[], object], repeats: int, warmup: int = 3) -> Spread:
        """Time a call in milliseconds, one after another."""
        for _ in range(warmup):
            call()
        self.wait()
        marks = [self.mark()]
        for _ in range(repeats):
            call()
            marks.append(self.mark())
        self.wait()
        return Spread.of([self.milliseconds(a, b) for a, b in itertools.pairwise(marks)])


def measure_bandwidth(device: torch.device) -> float:
    """Read a buffer far larger than any cache, in the better of two ways; bytes per second."""
    source = torch.ones(1 << (29 if device.type == "cuda" else 23), device=device)
    rows = source.view(-1, 4096)
    ways = [lambda: torch.sum(source), lambda: torch.amax(rows, dim=1)]
    best = min(Clock(device).repeat(call, 10).median for call in ways)
    return source.nbytes / best * 1e3


def per_call_ms(device: torch.device, calls: Sequence[Callable[[], object]]) -> float:
    """Time one call, the median over all of them in turn, as a graph on a GPU."""

    def chain() -> None:
        for call in calls:
            call()

    clock = Clock(device)
    with torch.inference_mode():
        if device.type != "cuda":
            return clock.repeat(chain, 3, 1).median / len(calls)
        chain()
        clock.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        return clock.repeat(graph.replay, 15).median / len(calls)


@contextmanager
def steady(
    engine: Engine, prompts: Sequence[Sequence[int]], num_rounds: int
) -> Iterator[Callable[[], None]]:
    """Compute all prompts at once, with room for a warm-up and this many rounds; greedily.

    Gives a call that goes one round on, and reads nothing back.
    """
    room = (num_rounds + WARMUP + 1) * engine.runner.sizes.query_len
    scheduler, runner = engine.scheduler, engine.runner
    budget = scheduler.prompts.budget
    scheduler.prompts.budget = None  # or the first request would end before the last one runs
    try:
        requests = engine.add_requests(greedy(prompts, room))
        while scheduler.waiting or scheduler.prefilling:
            engine.step()
    finally:
        scheduler.prompts.budget = budget
    engine.drain()
    for request in requests:
        runner.start_rows(grown=scheduler.blocks.reserve(request))
    rows = [request.state_row for request in scheduler.running]
    flags = SamplingFlags.of_all(request.flags for request in requests)
    bound = max(request.num_tokens for request in scheduler.running) - 1

    def run() -> None:
        nonlocal bound
        runner.run_step(rows, max_num_computed=bound, flags=flags)
        bound += runner.sizes.path_len

    try:
        yield run
    finally:
        engine.abort_all()


def tokens_needed(num_rounds: int, num_speculative_tokens: int) -> int:
    """Count the tokens after the prompt for which an engine needs room to run `steady`."""
    return (num_rounds + WARMUP + 2) * (num_speculative_tokens + 1)


def time_rounds(engine: Engine, prompts: Sequence[Sequence[int]], repeats: int) -> Spread:
    """Time a round in milliseconds."""
    with steady(engine, prompts, repeats) as run:
        return Clock(engine.runner.device).repeat(run, repeats, WARMUP)


def time_phases(
    engine: Engine, prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, float | None]:
    """Time each act of a round, the median in milliseconds; None for one that does not run."""
    clock = Clock(engine.runner.device)
    marks: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in PHASES}

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        start = clock.mark()
        yield
        marks[name].append((start, clock.mark()))

    with steady(engine, prompts, repeats) as run:
        for _ in range(WARMUP):
            run()
        with wrapped(engine.runner.acts, PHASES, noted):
            for _ in range(repeats):
                run()
        clock.wait()
    times = {name: [clock.milliseconds(*span) for span in spans] for name, spans in marks.items()}
    return {name: statistics.median(found) if found else None for name, found in times.items()}


@contextmanager
def wrapped(
    owner: object, names: Sequence[str], around: Callable[[str], Callable[[Method], Method]]
) -> Iterator[None]:
    """Decorate these methods of one object by `around(name)` while the body runs."""
    decorated = {name: around(name)(getattr(owner, name)) for name in names}
    for name, method in decorated.items():
        setattr(owner, name, method)  # it hides the one of the class
    try:
        yield
    finally:
        for name in decorated:
            delattr(owner, name)
