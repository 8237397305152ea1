"""`specdec bench serve`: how long a server makes its clients wait, in lines of 60 columns."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from specdec.bench.charts import draw_charts
from specdec.bench.http_load import MEASURES, PERCENTS, run_load
from specdec.cli.bench_choices import BenchServeChoices


def run_bench_serve(command: BenchServeChoices) -> None:
    """Measure, print, write. Exit code 1 if a request failed."""
    rows = asyncio.run(run_load(command.load))
    for row in rows:
        print(_report(row))
    date = time.strftime("%Y-%m-%d")
    if command.charts is not None:
        # a client does not know the server's device
        caption = f"{command.load.url}; {command.load.model or 'the first model listed'}; {date}"
        [chart] = draw_charts({"serve": rows}, command.charts, caption)
        print(f"chart: {chart}")
    found = {"command": command.command, "date": date, "rows": rows}
    if command.json is not None:
        command.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if any(row["num_failed"] for row in rows):
        raise SystemExit(1)


def _report(row: Mapping[str, Any]) -> str:
    answered = row["num_requests"] - row["num_failed"]
    head = f"{row['request_rate']:g} requests/s: {answered} of {row['num_requests']} answered"
    lines = [f"{head} in {row['seconds']:.1f} s", " " * 26 + "   p50 ms    p90 ms    p99 ms"]
    for name, words in MEASURES.items():
        values = (row[f"{name}_ms_p{percent}"] for percent in PERCENTS)
        shown = "".join(f"{'-':>10}" if each is None else f"{each:>10.1f}" for each in values)
        lines.append(f"  {words:<23}{shown}")
    speed = f"{row['requests_per_second']:.2f} requests/s, {row['tokens_per_second']:.0f} tokens/s"
    good = "" if row["goodput"] is None else f", goodput {row['goodput']:.2f} requests/s"
    lines.append(f"  {speed}{good}")
    if row["first_error"] is not None:
        lines.append(f"  FAILED: {row['num_failed']}, the first: {row['first_error']}")
    return "\n".join(lines)
