"""Moments on a device's own clock, and the spread of what lies between them."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | float


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several measurements: the median, and the ends of the middle 80 %."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """At least one value."""
        ordered = sorted(values)
        tail = len(ordered) // 10
        return Spread(statistics.median(ordered), ordered[tail], ordered[-1 - tail])


class Clock:
    """CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """This moment in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Between two marks; `wait` must lie between `end` and this call."""
        if isinstance(start, float):
            assert isinstance(end, float), "marks of two clocks"
            return 1e3 * (end - start)
        assert not isinstance(end, float), "marks of two clocks"
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def repeat(self, call: Callable[[], object], repeats: int, warmup: int = 3) -> Spread:
        """Milliseconds of a call, one behind the other."""
        for _ in range(warmup):
            call()
        self.wait()
        marks = [self.mark()]
        for _ in range(repeats):
            call()
            marks.append(self.mark())
        self.wait()
        return Spread.of([self.milliseconds(a, b) for a, b in itertools.pairwise(marks)])
