"""The sizes for which steps are measured, and what other sizes cost by these."""

import itertools
from collections.abc import Callable, Sequence

from specdec.kernels.tile_shapes import row_class
from specdec.scheduling.step_costs import Measured, StepCosts


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
    """
    found = dict(measured)
    for (low, low_ms), (high, high_ms) in itertools.pairwise(measured):
        low_more, high_more = low_ms - like(low), high_ms - like(high)
        for size in sizes:
            if low < size < high:
                share = (size - low) / (high - low)
                found[size] = like(size) + low_more + share * (high_more - low_more)
    return tuple(sorted(found.items()))


def as_rounds(rounds: Measured) -> Callable[[int], float]:
    """Price rows as rounds that share their tiles; more rows than any round has, as the largest."""
    by_class = StepCosts(rounds=tuple((row_class(n), ms) for n, ms in rounds), mixed=())
    largest, _ = by_class.rounds[-1]
    return lambda rows: by_class.round_ms(min(rows, largest), 0)
