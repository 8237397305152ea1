"""`specdec bench serve`: how long a server makes its clients wait, by load."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench.charts import draw_charts
from specdec.bench.http_client import Api
from specdec.bench.http_load import MEASURES, PERCENTS, LoadOptions, run_load
from specdec.cli.extras import check_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeCommand:
    """command: the whole command line. goodput: as it was given. json, charts: where to write."""

    command: str
    url: str
    model: str | None
    is_chat: bool
    api_key: str | None
    rates: str
    num_requests: int
    max_tokens: int | None
    temperature: float | None
    ignore_eos: bool
    goodput: str | None
    seed: int
    timeout: float
    json: Path | None
    charts: Path | None


def run_bench_serve(command: BenchServeCommand) -> None:
    """Measure, print, write. Exit code 1 if a request failed."""
    check_outputs(command.json, command.charts)
    rows = asyncio.run(run_load(_options(command)))
    for row in rows:
        print(_report(row))
    date = time.strftime("%Y-%m-%d")
    if command.charts is not None:
        # a client does not know the server's device
        caption = f"{command.url}; {command.model or 'the first model listed'}; {date}"
        [chart] = draw_charts({"serve": rows}, command.charts, caption)
        print(f"chart: {chart}")
    found = {"command": command.command, "date": date, "rows": rows}
    if command.json is not None:
        command.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if any(row["num_failed"] for row in rows):
        raise SystemExit(1)


def _options(command: BenchServeCommand) -> LoadOptions:
    if command.timeout == 0:
        raise ValueError("--timeout 0: give a number of seconds above 0")
    fields: dict[str, object] = {}
    if command.temperature is not None:
        fields["temperature"] = command.temperature
    if command.ignore_eos:
        fields["ignore_eos"] = True
    api = Api(
        url=_base_of(command.url),
        model=command.model,
        is_chat=command.is_chat,
        api_key=command.api_key,
        fields=fields,
    )
    return LoadOptions(
        api=api,
        rates=_rates(command.rates),
        num_requests=command.num_requests,
        most_answer=command.max_tokens,
        goodput=_goodput(command.goodput),
        seed=command.seed,
        timeout=command.timeout,
    )


def _base_of(url: str) -> str:
    """Leave out /v1."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"URL {url}: give one that begins with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _rates(given: str) -> list[float]:
    try:
        rates = [float(part) for part in given.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--request-rate {given}: give numbers above 0 with commas between them")
    return rates


def _goodput(given: str | None) -> dict[str, float]:
    """Read "ttft:500,tpot:50" in ms."""
    limits = {}
    for part in given.split(",") if given is not None else ():
        name, _, value = part.partition(":")
        if name not in MEASURES or not value.replace(".", "", 1).isdigit():
            wanted = f"{', '.join(MEASURES)}, each with a number of ms, such as ttft:500,tpot:50"
            raise ValueError(f"--goodput {given}: give any of {wanted}")
        limits[name] = float(value)
    return limits


def _report(row: Mapping[str, Any]) -> str:
    """Show one run, in lines of at most 60 columns."""
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
