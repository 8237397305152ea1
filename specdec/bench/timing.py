"""Moments on a device's own clock, and the spread of the times between them."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
        if isinstance(start, float):
            assert isinstance(end, float), "marks of two clocks"
            return 1e3 * (end - start)
        assert not isinstance(end, float), "marks of two clocks"
        return float(start.elapsed_time(end))

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


@contextmanager
def wrapped(
    owner: object, names: Sequence[str], around: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run these methods of one object inside `around(name)` while the body runs."""
    for name in names:
        setattr(owner, name, _inside(getattr(owner, name), around, name))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)  # the class has the original


def _inside(
    call: Callable[..., object], around: Callable[[str], AbstractContextManager[None]], name: str
) -> Callable[..., object]:
    def inside(*args: object, **options: object) -> object:
        with around(name):
            return call(*args, **options)

    return inside
