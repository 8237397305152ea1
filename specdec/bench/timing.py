"""Moments on a device's own clock, and the spread of the times between them."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CACHES = 256 << 20  # bytes that a GPU's caches do not hold
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


class Clock:
    """CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, Mark, Mark]] = []

    def mark(self) -> Mark:
        """This moment in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Between two marks, after `wait`."""
        is_gpu = self.device.type == "cuda"
        return float(start.elapsed_time(end) if is_gpu else 1e3 * (end - start))

    def wait(self) -> None:
        """Until the device has finished everything it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def repeat(self, call: Callable[[], object], repeats: int, warmup: int = 3) -> Spread:
        """Milliseconds of a call, one after another."""
        for _ in range(warmup):
            call()
        self.wait()
        marks = [self.mark()]
        for _ in range(repeats):
            call()
            marks.append(self.mark())
        self.wait()
        return Spread.of([self.milliseconds(a, b) for a, b in itertools.pairwise(marks)])

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Note the start and the end of the body under this name."""
        start = self.mark()
        yield
        self._spans.append((name, start, self.mark()))

    def spans(self) -> list[tuple[str, float]]:
        """Names and milliseconds of the bodies so far, in the order of their ends."""
        self.wait()
        return [(name, self.milliseconds(start, end)) for name, start, end in self._spans]


def per_call_ms(device: torch.device, calls: Sequence[Callable[[], object]]) -> float:
    """The median of one call, over all of them in turn, as a graph on a GPU."""

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
