"""Charts of figures as PNG files, each if its suite was run.

Each names the device, the model and the date in the picture. matplotlib, which ships no types,
comes with the extra `bench`. Nothing here imports torch, for which the client of a load need not
wait.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
WIDEST_ROUND = 32  # requests; wider rounds would dwarf the others in the chart
MARKERS = "sovD"  # of chains, and of trees by their width
PARTS = ("verify", "extend", "propose", "rest")  # of a round
WAITING = {"ttft": "time to first token", "itl": "between deliveries"}


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
    from matplotlib.figure import Figure

    loop = [row for row in suites.get("loop", ()) if "load" not in row]  # no ramps
    trees = [row for row in suites.get("trees", ()) if row["num_speculative_tokens"]]
    drawings: dict[str, tuple[Callable[[Any, Rows], None], Rows]] = {
        "anatomy.png": (_anatomy, suites.get("rounds", ())),
        "batch.png": (partial(_speeds, "per_user", "Speed per user"), suites.get("protocol", ())),
        "loop.png": (partial(_speeds, "tokens_per_second", "Requests in a closed loop"), loop),
        "products.png": (_products, suites.get("products", ())),
        "serve.png": (_waiting, suites.get("serve", ())),
    }
    for batch in sorted(_values(trees, "batch")):
        drawings[f"trees-batch-{batch}.png"] = (_trees, _where(trees, batch=batch))
    drafts = suites.get("drafts", ())
    for batch in sorted(_values(drafts, "batch")):
        drawings[f"drafts-batch-{batch}.png"] = (_drafts, _where(drafts, batch=batch))
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, rows) in drawings.items():
        usable = [row for row in rows if "refused" not in row]
        if usable:
            figure = Figure(figsize=(9, 5), layout="constrained")
            axes = figure.subplots()
            draw(axes, usable)
            if axes.get_yscale() == "linear":
                axes.set_ylim(0, None)
            axes.legend(fontsize=8)
            figure.supxlabel(caption, fontsize=8, color="grey")
            written.append(directory / f"{prefix}{name}")
            figure.savefig(written[-1], dpi=100)
    return written


def _anatomy(axes: Any, rows: Rows) -> None:
    """Stack the phases of each round, its floor beside them."""
    rows = [row for row in rows if row["batch"] <= WIDEST_ROUND] or rows
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    columns = list(rows[0])
    for phase in columns[columns.index("of_floor") + 1 :]:
        values = [row.get(phase) or 0.0 for row in rows]
        axes.bar([i - 0.15 for i in places], values, 0.5, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    floors = [row["floor_ms"] for row in rows]
    label = "floor: weights at reading speed"
    axes.bar([i + 0.25 for i in places], floors, 0.25, color="lightgrey", label=label)
    names = [f"K = {row['num_speculative_tokens']}\nbatch {row['batch']}" for row in rows]
    axes.set_xticks(list(places), names)
    axes.set(ylabel="ms of a round on the device", title="Where a round's time goes")


def _speeds(name: str, title: str, axes: Any, rows: Rows) -> None:
    """Draw a line for each K over the requests at a time, dotted where sampled."""
    rows = latest(rows)
    temperatures = _values(rows, "temperature")
    Ks = sorted(_values(rows, "num_speculative_tokens"), key=str)
    for K, T in itertools.product(Ks, temperatures):
        points = _where(rows, num_speculative_tokens=K, temperature=T)
        style = {"linestyle": ":"} if T > 0 else {"label": f"K = {K}"}
        color = f"C{K}" if isinstance(K, int) else "black"
        _plot(axes, points, "batch", name, color=color, **style)
    sampled = ", ".join(f"{T:g}" for T in sorted(temperatures) if T > 0)
    axes.set(
        xlabel="requests that run at all times",
        ylabel="tokens per second" + (" and user" if name == "per_user" else ""),
        title=title + (f"; dotted: temperature {sampled}" if sampled else ""),
    )
    _powers_of_two(axes, [row["batch"] for row in rows])


def latest(rows: Rows) -> Rows:
    """Keep the last row of each setting, by batch; greedy where none has a temperature."""
    names = ("num_speculative_tokens", "batch", "temperature")
    by_batch = sorted(({"temperature": 0.0, **row} for row in rows), key=lambda row: row["batch"])
    return list({tuple(row[name] for name in names): row for row in by_batch}.values())


def _products(axes: Any, rows: Rows) -> None:
    """Draw the target's products; the draft's shapes differ only in its inputs."""
    shares = {"of_bandwidth": "-", "cublas_of_bandwidth": ":"}
    rows = [{**row, **{name: 100 * row[name] for name in shares}} for row in rows]
    weights = [name for name in _values(rows, "weight") if "target " in name]
    for index, weight in enumerate(weights):
        for name, style in shares.items():
            label = weight if name == "of_bandwidth" else None
            points = _where(rows, weight=weight)
            _plot(axes, points, "M", name, linestyle=style, color=f"C{index}", label=label)
    axes.set(xlabel="rows M", ylabel="% of the reading speed", title="Products; dotted: cuBLAS")
    _powers_of_two(axes, [row["M"] for row in rows])


def _trees(axes: Any, rows: Rows) -> None:
    """Draw speed over the rows of a round, by children of a node; dotted: drafts stop."""
    rows = sorted(rows, key=lambda row: (row["rows"], row["tokens_per_second"]))
    temperatures, widths = sorted(_values(rows, "temperature")), sorted(_values(rows, "top_k"))
    for T, top_k, stops in itertools.product(temperatures, widths, (False, True)):
        points = _where(rows, temperature=T, top_k=top_k)
        best = {row["rows"]: row for row in points if (row["threshold"] is not None) == stops}
        kind = "chain" if top_k == 1 else f"k = {top_k}"
        _plot(
            axes,
            list(best.values()),
            "rows",
            "tokens_per_second",
            linestyle=":" if stops else "-",
            color=f"C{temperatures.index(T)}",
            marker=MARKERS[widths.index(top_k) % len(MARKERS)],
            markerfacecolor="white" if stops else None,
            label=None if stops or not best else f"{kind}, T = {T:g}",
        )
    title = f"Draft trees and chains, batch {rows[0]['batch']}; dotted: drafts stop"
    axes.set(xlabel="rows N of a request", ylabel="tokens per second", title=title)


def _drafts(axes: Any, rows: Rows) -> None:
    """Lay the parts of rounds end to end, a bar for each kind and K; beside it the speed."""
    rows = rows[::-1]  # the first one is the uppermost
    places = [1.0 + i for i in range(len(rows))]
    ends = [0.0] * len(rows)
    for part in PARTS:
        widths = [row[f"{part}_ms"] for row in rows]
        axes.barh(places, widths, 0.7, left=ends, label=part)
        ends = [a + b for a, b in zip(ends, widths, strict=True)]
    for place, end, row in zip(places, ends, rows, strict=True):
        speed, length = row["tokens_per_second"], row["mean_acceptance_length"]
        text = f" {speed:,.0f} tokens/s, {length:.2f} a round"
        axes.text(end, place, text, va="center", fontsize=8)
    names = [f"{row['draft']}, K = {row['num_speculative_tokens']}" for row in rows]
    axes.set_yticks(places, [name.replace("none, K = 0", "plain") for name in names])
    axes.set_xlim(0, 1.5 * max(ends))  # room for the texts and the legend
    held = "; drafts held at given rates" if any("oracle" in row for row in rows) else ""
    title = f"A round by its parts, batch {rows[0]['batch']}{held}"
    axes.set(xlabel="ms of a round on the device", title=title)


def _waiting(axes: Any, rows: Rows) -> None:
    """Draw how long clients of a server wait, over the requests that arrive."""
    for index, (name, words) in enumerate(WAITING.items()):
        for percent, style in ((50, "-"), (99, ":")):
            label = f"{words}, p{percent}"
            y = f"{name}_ms_p{percent}"
            _plot(axes, rows, "request_rate", y, linestyle=style, color=f"C{index}", label=label)
    axes.set(xlabel="requests per second that arrive", ylabel="ms", title="Waiting by load")
    axes.set_yscale("log")


def _values(rows: Rows, name: str) -> list[Any]:
    """List the different values of a column, in their order."""
    return list(dict.fromkeys(row[name] for row in rows))


def _where(rows: Rows, **setting: object) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in setting.items())]


def _plot(axes: Any, rows: Rows, x: str, y: str, marker: str = ".", **style: object) -> None:
    axes.plot([row[x] for row in rows], [row[y] for row in rows], marker=marker, **style)


def _powers_of_two(axes: Any, values: Sequence[int]) -> None:
    """Put ticks at powers of two, and at the greatest value."""
    ticks = sorted({value for value in values if value & (value - 1) == 0 or value == max(values)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
