"""Waiting times by load as a PNG file. matplotlib comes with the extra `bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN = {"ttft": "time to first token", "itl": "between deliveries"}


def draw_load(rows: Sequence[Mapping[str, Any]], directory: Path, caption: str) -> Path:
    """Write serve.png and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    rates = [row["request_rate"] for row in rows]
    for index, (name, label) in enumerate(SHOWN.items()):
        for percent, style in ((50, "-"), (99, ":")):
            values = [row[f"{name}_ms_p{percent}"] for row in rows]
            legend = f"{label}, p{percent}"
            axes.plot(rates, values, style, color=f"C{index}", marker="o", label=legend)
    axes.set(xlabel="requests per second that arrive", ylabel="ms", title="Waiting by load")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    figure.supxlabel(caption, fontsize=8, color="grey")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "serve.png"
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
    return file
