"""Figures as text: percentiles, a card of facts, a table for each kind of rows.

Nothing here imports torch, for which the client of a load need not wait.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence

Row = dict[str, object]
HEADINGS = {
    "num_speculative_tokens": "K",
    "tokens_per_second": "tokens/s",
    "per_user": "tokens/s per user",
    "mean_acceptance_length": "acceptance length",
    "gb_per_s": "GB/s",
    "cublas_gb_per_s": "cuBLAS GB/s",
}
SHARES = {"price", "of_floor", "of_bandwidth", "cublas_of_bandwidth", "gap_share", "share"}


def card_lines(card: Mapping[str, object]) -> str:
    """Write one fact a line."""
    width = max(map(len, card))
    return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in card.items())


def tables(rows: Sequence[Mapping[str, object]]) -> str:
    """Print a table for each kind of rows, which is told by the first column."""
    kinds = itertools.groupby(rows, key=lambda row: next(iter(row)))
    return "\n\n".join(table(list(each)) for _, each in kinds)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Align rows; the columns are the names in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[HEADINGS.get(name, name.replace("_", " ")) for name in names]]
    cells += [[_show(row.get(name), name in SHARES) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)


def _show(value: object, is_share: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        form = ".1%" if is_share else ",.0f" if abs(value) >= 1000 else ".3f"
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value)


def percentile(seconds: Sequence[float], percent: int) -> float | None:
    """Give a percentile in milliseconds; None if there are no values."""
    if len(seconds) < 2:
        return 1e3 * seconds[0] if seconds else None
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]
