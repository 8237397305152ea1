"""Figures as text: a card of facts, a table per suite; and as JSON, beside the command that found them."""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

HEADINGS = {
    "num_speculative_tokens": "K",
    "tokens_per_second": "tokens/s",
    "per_user": "tokens/s per user",
    "mean_acceptance_length": "acceptance length",
    "gb_per_s": "GB/s",
    "cublas_gb_per_s": "cuBLAS GB/s",
}
SHARES = (
    "difference",
    "device_difference",
    "price",
    "of_floor",
    "of_bandwidth",
    "cublas_of_bandwidth",
    "gap_share",
    "share",
)


def write_json(script: str, found: Mapping[str, object], file: Path | None = None) -> None:
    """What a script found, beside its command: as the last line of its output, and in a file where one is wanted."""
    command = shlex.join(["python", "-m", script, *sys.argv[1:]])
    whole = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    } | dict(found)
    if file is not None:
        file.write_text(json.dumps(whole, indent=1, default=str) + "\n")
    print(json.dumps(whole, default=str))


def card_lines(card: Mapping[str, object]) -> str:
    """One fact a line."""
    width = max(map(len, card))
    return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in card.items())


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Aligned; the columns are the names in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[HEADINGS.get(name, name.replace("_", " ")) for name in names]]
    cells += [[_show(row.get(name), name in SHARES) for name in names] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def _show(value: object, is_share: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return (
            f"{value:.1%}"
            if is_share
            else f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.3f}"
        )
    return f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value)
