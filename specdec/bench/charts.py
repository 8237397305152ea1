"""Charts of a run's figures as PNG files, each if its suite was run.

Each names the device, the model and the date in the picture. matplotlib, which ships no types,
comes with the extra `bench`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.step import PHASES

Rows = Sequence[Mapping[str, Any]]
WIDEST_ROUND = 32  # requests; wider rounds would dwarf the others in the chart
MARKERS = "sovD"  # of chains, and of trees by their width


def caption(cards: Sequence[Mapping[str, object]], model: str | None = None) -> str:
    """Name device, model and dates of the runs whose cards these are.

    model: what to write in place of the target's path
    """

    def values(name: str) -> list[str]:
        return sorted({str(card[name]) for card in cards if card.get(name)})

    size, dates = cards[0].get("target_bytes_per_pass"), values("date")
    target = model or ", ".join(values("target"))
    if isinstance(size, int):
        target += f" ({size / 1e9:.1f} GB a pass)"
    return "; ".join((", ".join(values("device")), target, " to ".join(dates[:1] + dates[1:][-1:])))


def draw_charts(
    suites: Mapping[str, Rows], directory: Path, caption: str, prefix: str = ""
) -> list[Path]:
    """Write them, `prefix` before each file name, and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = [row for row in suites.get("loop", []) if "load" not in row]  # no ramps
    drawings = {
        "anatomy.png": (_anatomy, suites.get("rounds", [])),
        "batch.png": (_per_user, suites.get("protocol", [])),
        "loop.png": (_loop, loads),
        "loop-per-user.png": (_loop_per_user, loads),
        "products.png": (_bandwidth_over_rows, suites.get("products", [])),
        **_trees_by_batch(suites.get("trees", [])),
    }
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, rows) in drawings.items():
        usable = [row for row in rows if "refused" not in row]
        if usable:
            figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
            draw(axes, usable)
            axes.set_ylim(0, None)
            axes.legend(fontsize=8)
            figure.supxlabel(caption, fontsize=8, color="grey")
            written.append(directory / f"{prefix}{name}")
            figure.savefig(written[-1], dpi=100)
            pyplot.close(figure)
    return written


def _anatomy(axes: Any, rows: Rows) -> None:
    """Stack the phases of each round, its floor beside them."""
    rows = [row for row in rows if row["batch"] <= WIDEST_ROUND] or rows
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for phase in PHASES:
        values = [row.get(phase) or 0.0 for row in rows]
        axes.bar([i - 0.15 for i in places], values, 0.5, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    floors = [row["floor_ms"] for row in rows]
    label = "floor: weights at reading speed"
    axes.bar([i + 0.25 for i in places], floors, 0.25, color="lightgrey", label=label)
    names = [f"K = {row['num_speculative_tokens']}\nbatch {row['batch']}" for row in rows]
    axes.set_xticks(list(places), names)
    axes.set(ylabel="ms of a round on the device", title="Where a round's time goes")


def _per_user(axes: Any, rows: Rows) -> None:
    for K in sorted({row["num_speculative_tokens"] for row in rows}):
        points = per_user(rows, K)
        axes.plot(list(points), list(points.values()), marker="o", label=f"K = {K}")
    axes.set(xlabel="batch", ylabel="tokens per second and user", title="Speed per user")
    _powers_of_two(axes, [row["batch"] for row in rows])


def per_user(rows: Rows, K: int) -> dict[int, float]:
    """Sort by batch; of two rows of one batch the later counts."""
    found = {row["batch"]: row["per_user"] for row in rows if row["num_speculative_tokens"] == K}
    return dict(sorted(found.items()))


def _loop(axes: Any, rows: Rows) -> None:
    _by_load(axes, rows, "tokens_per_second", "tokens per second")


def _loop_per_user(axes: Any, rows: Rows) -> None:
    _by_load(axes, rows, "per_user", "tokens per second and user")


def _by_load(axes: Any, rows: Rows, name: str, label: str) -> None:
    """Draw a line for each K, dotted where sampled."""
    rows = latest(rows)
    for K in sorted({row["num_speculative_tokens"] for row in rows}, key=str):
        for T, style in ((0.0, "-"), (0.8, ":")):
            points = [
                row for row in rows if (row["num_speculative_tokens"], row["temperature"]) == (K, T)
            ]
            loads = [row["batch"] for row in points]
            values = [row[name] for row in points]
            legend = f"K = {K}" if T == 0 else None
            color = f"C{K}" if isinstance(K, int) else "black"
            axes.plot(loads, values, style, color=color, marker=".", label=legend)
    title = "Requests in a closed loop; dotted: temperature 0.8"
    axes.set(xlabel="requests that run at all times", ylabel=label, title=title)
    _powers_of_two(axes, [row["batch"] for row in rows])


def latest(rows: Rows) -> Rows:
    """Keep the last row of each setting, by batch."""
    names = ("num_speculative_tokens", "batch", "temperature")
    by_batch = sorted(rows, key=lambda row: row["batch"])
    return list({tuple(row[name] for name in names): row for row in by_batch}.values())


def _bandwidth_over_rows(axes: Any, rows: Rows) -> None:
    """Draw the target's products; the draft's shapes differ only in its inputs."""
    weights = dict.fromkeys(row["weight"] for row in rows if "target " in row["weight"])
    for index, name in enumerate(weights):
        points = [row for row in rows if row["weight"] == name]
        M = [row["M"] for row in points]
        color = f"C{index}"
        ours = [100 * row["of_bandwidth"] for row in points]
        cublas = [100 * row["cublas_of_bandwidth"] for row in points]
        axes.plot(M, ours, "-", color=color, marker=".", label=name)
        axes.plot(M, cublas, ":", color=color, marker=".")
    axes.set(xlabel="rows M", ylabel="% of the reading speed", title="Products; dotted: cuBLAS")
    _powers_of_two(axes, [row["M"] for row in rows])


def _trees_by_batch(rows: Rows) -> dict[str, tuple[Callable[[Any, Rows], None], Rows]]:
    """Make a chart for each number of requests at a time."""
    return {
        f"trees-batch-{batch}.png": (_trees, [row for row in rows if row["batch"] == batch])
        for batch in sorted({row["batch"] for row in rows if _has_drafts(row)})
    }


def _has_drafts(row: Mapping[str, Any]) -> bool:
    return "refused" not in row and bool(row["num_speculative_tokens"])


def _trees(axes: Any, rows: Rows) -> None:
    """Draw speed over the rows of a round, by children of a node; dotted: drafts stop."""
    rows = [row for row in rows if _has_drafts(row)]
    temperatures = sorted({row["temperature"] for row in rows})
    widths = sorted({row["top_k"] for row in rows})
    for T, top_k, stops in itertools.product(temperatures, widths, (False, True)):
        best: dict[int, float] = {}
        for row in rows:
            is_here = (row["temperature"], row["top_k"]) == (T, top_k)
            if is_here and (row["threshold"] is not None) == stops:
                speed = row["tokens_per_second"]
                best[row["rows"]] = max(best.get(row["rows"], 0.0), speed)
        if best:
            kind = "chain" if top_k == 1 else f"k = {top_k}"
            axes.plot(
                sorted(best),
                [best[N] for N in sorted(best)],
                ":" if stops else "-",
                color=f"C{temperatures.index(T)}",
                marker=MARKERS[widths.index(top_k) % len(MARKERS)],
                markerfacecolor="white" if stops else None,
                label=None if stops else f"{kind}, T = {T:g}",
            )
    title = f"Draft trees and chains, batch {rows[0]['batch']}; dotted: drafts stop"
    axes.set(xlabel="rows N of a request", ylabel="tokens per second", title=title)


def _powers_of_two(axes: Any, values: Sequence[int]) -> None:
    """Put ticks at powers of two, and at the greatest value."""
    ticks = sorted({value for value in values if value & (value - 1) == 0 or value == max(values)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
