"""Which sizes are captured, and which of them serves a batch.

FULL graphs of uniform batches are keyed by request count, those of ragged ones by both counts, and
PIECEWISE graphs by token count. No list is derived from another: a list of tokens divided by K+1
leaves some counts without a graph.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from graphs.modes import BatchDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """Ascending request counts for FULL and token counts for PIECEWISE.

    further: FULL graphs of other batches, small before large among those that differ in size alone:
        of ragged ones, of other rows for each request, of several kinds
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    further: tuple[BatchDescriptor, ...] = ()


def capture_sizes(
    max_num_reqs: int,
    max_num_tokens: int,
    requests: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
) -> CaptureSizes:
    """The default sizes up to both limits, or the given ones, checked.

    requests: 1 to 8, then steps of 8 up to max_num_reqs
    tokens:   powers of two from 16 up to max_num_tokens and, from 64, 1.5 times them, from 128 1.25
              times, from 256 1.75 times; few serve up to 64 rows, where a pass takes as long as
              reading the weights, and many where each row costs
    """
    if requests is None:
        requests = [*range(1, min(8, max_num_reqs) + 1), *range(16, max_num_reqs, 8), max_num_reqs]
    if tokens is None:
        powers = [1 << i for i in range(4, max_num_tokens.bit_length())]
        steps = [p * quarters // 4 for p in powers for quarters in _quarters(p)]
        tokens = [n for n in steps if n < max_num_tokens] + [max_num_tokens]
    return CaptureSizes(
        requests=_checked("cuda graph sizes", requests, max_num_reqs, "requests"),
        tokens=_checked("cuda graph token sizes", tokens, max_num_tokens, "tokens"),
    )


def _quarters(power: int) -> tuple[int, ...]:
    if power < 128:
        return (4, 6) if power >= 64 else (4,)
    return (4, 5, 6, 7) if power >= 256 else (4, 5, 6)


def padding_map(sizes: Sequence[int]) -> list[int]:
    """Entry n is the smallest size that holds n, for n from 0 to the largest size."""
    return [sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)] if sizes else []


def _checked(what: str, sizes: Sequence[int], largest: int, unit: str) -> tuple[int, ...]:
    if any(not 1 <= size <= largest for size in sizes):
        limits = f"between 1 and the limit of {largest} {unit}"
        raise ValueError(f"{what}={list(sizes)}: each must lie {limits}")
    return tuple(sorted(set(sizes)))
