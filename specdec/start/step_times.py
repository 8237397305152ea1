"""Measures how long some steps take on the device, and tells what those of other sizes do.

Steps run one right after another and nothing waits for them: all are launched before the first time
is read.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.kernels.tile_shapes import row_class
from specdec.rounds.step_sizes import Step
from specdec.runner import Runner
from specdec.scheduling.costs import Measured, ms_at
from specdec.start.spread import spread
from specdec.step import Acts

FEW_ROWS = 64  # a step of more takes long enough that one run tells


class Timed:
    """A step, run twice if it is short. Reading a time waits for the runs.

    The fastest counts: outliers are only ever slow, and so is the first run of a graph. If the
    target has experts, the rows of a step of padding differ: see spread.py.
    """

    def __init__(self, runner: Runner, step: Step) -> None:
        self.step, self._prepare = spread(runner, step)
        self.varies = runner.sizes.is_adaptive  # the number of levels, from step to step
        self._acts = _MarkingActs(**vars(runner.acts))
        self._acts.varies = self.varies
        # marks of each run, and of the draft's levels in it, if their number varies
        self._runs: list[tuple[Any, Any, tuple[Any, Any] | None]] = []
        for _ in range(2 if step.num_tokens <= FEW_ROWS else 1):
            self.run()

    def run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        start = mark()
        self._acts.levels = None
        with torch.inference_mode():
            self._acts.run(self.step)
        self._runs.append((start, mark(), self._acts.levels))

    def _times(self) -> list[tuple[float, float]]:
        """Read milliseconds of each run, and of the draft's levels after the first in it."""
        return [
            (milliseconds(start, end), 0.0 if levels is None else milliseconds(*levels))
            for start, end, levels in self._runs
        ]

    @property
    def ms(self) -> float:
        return min(ms for ms, _ in self._times())

    @property
    def one_level_ms(self) -> float:
        """Milliseconds of the step without the draft's levels after the first, or its block."""
        return min(ms - levels_ms for ms, levels_ms in self._times())

    @property
    def levels_ms(self) -> float:
        """Milliseconds of all these levels, or of the block; 0 where there are none."""
        return min(levels_ms for _, levels_ms in self._times())

    @property
    def level_ms(self) -> float:
        """Milliseconds of each of these levels."""
        most = self.step.next_shape.levels - 1 if self.varies else 0
        return self.levels_ms / most if most > 0 else 0.0


class _MarkingActs(Acts):
    """A step that marks when the draft's levels after the first begin and end.

    Where their number is fixed, they are a part of the step like any other.
    """

    levels: tuple[Any, Any] | None = None
    varies = False

    def decode_draft(self, step: Step) -> None:
        """Mark the levels if their number varies."""
        begin = mark()
        super().decode_draft(step)
        if self.varies:
            self.levels = begin, mark()


def mark() -> Any:
    """Mark the moment on the device when all that was launched before is over."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Wait for two marks, and measure the time between them."""
    end.synchronize()
    return float(start.elapsed_time(end))


def compute_and_launch_ms(runner: Runner, step: Step) -> tuple[float, float]:
    """Time prompts right after another: milliseconds on the device, and until all is launched."""
    step, _ = spread(runner, step)
    with torch.inference_mode():
        runner.acts.run(step)
        start = mark()
        began = time.perf_counter()
        runner.acts.run(step)
        launch_ms = 1e3 * (time.perf_counter() - began)
        end = mark()
    return milliseconds(start, end), launch_ms


def of_classes(counts: Sequence[int]) -> list[int]:
    """Take the largest of ascending counts in each class of rows, which share tiles."""
    return list({row_class(n): n for n in counts}.values())


def apart(sizes: Sequence[int], factor: int) -> list[int]:
    """From ascending sizes take the first, each `factor` times the one before, and the last."""
    chosen = list(sizes[:1])
    for size in sizes[1:]:
        if size >= factor * chosen[-1] or size == sizes[-1]:
            chosen.append(size)
    return chosen


def between(
    measured: Measured, sizes: Sequence[int], like: Callable[[int], float] = lambda _: 0.0
) -> Measured:
    """Add to the measured sizes those of `sizes` that lie between two of them.

    like: milliseconds of similar steps by size, whose difference to the measured ones grows evenly
        from one to the next

    None takes more or less than both of its neighbours, whatever else ran while one was measured.
    """
    found = dict(measured)
    for (low, low_ms), (high, high_ms) in itertools.pairwise(measured):
        low_more, high_more = low_ms - like(low), high_ms - like(high)
        for size in sizes:
            if low < size < high:
                share = (size - low) / (high - low)
                ms = like(size) + low_more + share * (high_more - low_more)
                found[size] = min(max(ms, min(low_ms, high_ms)), max(low_ms, high_ms))
    return tuple(sorted(found.items()))


def as_rounds(rounds: Measured) -> Callable[[int], float]:
    """Price rows as rounds that share their tiles; more rows than any round has, as the largest."""
    by_class = tuple({row_class(n): ms for n, ms in rounds}.items())
    largest, _ = by_class[-1]
    return lambda rows: ms_at(by_class, min(rows, largest))
