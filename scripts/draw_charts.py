"""What do the figures of several runs of `specdec bench` look like as charts?

    python -m scripts.draw_charts benchmarks/2026-11-21-h200-*.json --out benchmarks
    python -m scripts.draw_charts run.json --out /tmp/charts --prefix 2026-11-21-h200- --model 8B

The suite loop is taken from all files, each of its settings from the last file that has it; other
suites are from the last file that has them. Each picture names the devices, models and dates of the
files that it shows. Needs matplotlib.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from specdec.bench.charts import caption, draw_charts


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory of the PNG files")
    parser.add_argument("--prefix", default="", help="before each file name, like 2026-11-21-h200-")
    parser.add_argument("--model", help="its name in the pictures; default: the target's path")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    suites: dict[str, list[dict[str, object]]] = defaultdict(list)
    cards: dict[str, list[dict[str, object]]] = defaultdict(list)
    for file in given.files:
        run = json.loads(file.read_text())
        if not run.get("suites"):
            print(f"{file}: no suites of specdec bench in it, left out", file=sys.stderr)
        for name, rows in run.get("suites", {}).items():
            is_more = name == "loop"
            suites[name] = [*suites[name], *rows] if is_more else rows
            cards[name] = [*cards[name], run["card"]] if is_more else [run["card"]]
    for name, rows in suites.items():
        text = caption(cards[name], given.model)
        for path in draw_charts({name: rows}, given.out, text, given.prefix):
            print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
