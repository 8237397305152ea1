"""What do the figures of several runs of `specdec bench` look like as charts?

    python -m scripts.draw_charts benchmarks/2026-11-21-h200-*.json --out benchmarks
    python -m scripts.draw_charts run.json --out /tmp/charts --prefix 2026-11-21-h200-

The suite loop is taken from all files, each of its settings from the last file that has it; other
suites are from the last file that has them. Needs matplotlib.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from specdec.bench.charts import draw_charts


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory of the PNG files")
    parser.add_argument("--prefix", default="", help="before each file name, like 2026-11-21-h200-")
    return parser.parse_args(args)


def suites_of(file: Path) -> dict[str, list[dict[str, object]]]:
    """Rows by suite, as `specdec bench --json` writes them; none in the files of other scripts."""
    suites: dict[str, list[dict[str, object]]] = json.loads(file.read_text()).get("suites", {})
    if not suites:
        print(f"{file}: no suites of specdec bench in it, left out", file=sys.stderr)
    return suites


def main(args: Sequence[str] | None = None) -> None:
    given = parse_args(args)
    suites: dict[str, list[dict[str, object]]] = defaultdict(list)
    for file in given.files:
        for name, rows in suites_of(file).items():
            suites[name] = suites[name] + rows if name == "loop" else rows
    for path in draw_charts(suites, given.out, given.prefix):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
