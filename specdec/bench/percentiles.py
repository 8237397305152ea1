"""Percentiles of what was measured. Without torch, for which the client of a load need not wait."""

import statistics
from collections.abc import Sequence


def percentile(seconds: Sequence[float], percent: int) -> float | None:
    """Give a percentile in milliseconds; None if there are no values."""
    if len(seconds) < 2:
        return 1e3 * seconds[0] if seconds else None
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def nearest_rank(counts: Sequence[int], percent: int) -> int | None:
    """Choose the smallest count that so many percent do not exceed; None if there is none."""
    return sorted(counts)[-(-percent * len(counts) // 100) - 1] if counts else None
