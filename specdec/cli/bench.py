"""`specdec bench`: a card, a table per suite, and one last line of JSON; charts where they are wanted."""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.bench.bench import Bench, BenchOptions
from specdec.bench.card import card, measure_bandwidth
from specdec.bench.charts import draw_charts
from specdec.bench.pair import load_pair
from specdec.bench.report import card_lines, table
from specdec.bench.suites import SUITES


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """The command line as given. json, charts: where to write."""

    target: str
    draft: str | None
    suites: tuple[str, ...]
    options: BenchOptions
    prompts: Path | None
    dtype: str
    device: str
    json: Path | None
    charts: Path | None


def run_bench(command: BenchCommand) -> None:
    """Measure, print, write. Exit code 1 if an output differed from plain decoding."""
    names = chosen(command.suites)
    pair = load_pair(command.target, command.draft, command.device, command.dtype, command.prompts)
    bandwidth = measure_bandwidth(pair.device)
    bench = Bench(pair, bandwidth, command.options)
    facts = card(pair, bandwidth, host=platform.machine(), date=time.strftime("%Y-%m-%d"), **_settings(command.options))
    print(card_lines(facts), flush=True)
    suites: dict[str, list[dict[str, object]]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        if not bench.has_time(name):
            continue
        start = time.monotonic()
        suites[name] = SUITES[name](bench)
        seconds[name] = time.monotonic() - start
        print(f"\n{name} ({seconds[name]:.0f} s): {SUITES[name].__doc__}\n{table(suites[name])}", flush=True)
    _finish(command, bench, {"card": facts, "suites": suites, "seconds": seconds})


def chosen(names: tuple[str, ...]) -> list[str]:
    """In the order of SUITES, in which an engine is used as long as it is there."""
    unknown = [name for name in names if name not in (*SUITES, "all")]
    if unknown:
        raise ValueError(f"--suite {unknown[0]}: allowed are all, {', '.join(SUITES)}")
    return [name for name in SUITES if name in names or "all" in names]


def default_batches(device: str) -> str:
    """What the protocol says, and what a CPU has time for."""
    return "1,8,32" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "1"


def rounded(value: object) -> object:
    """Floats with six digits: no more of them were measured."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def integers(option: str, text: str) -> tuple[int, ...]:
    """ "0,3,5" as numbers."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text}: give whole numbers with commas between them") from None
    if any(value < 0 for value in values):
        raise ValueError(f"{option} {text}: give numbers of at least 0")
    return values


def _settings(options: BenchOptions) -> dict[str, object]:
    return {
        name: getattr(options, name) for name in ("num_prompts", "max_tokens", "max_model_len", "repeats", "num_rounds")
    }


def _finish(command: BenchCommand, bench: Bench, result: Mapping[str, object]) -> None:
    """Charts, files, the line of JSON, the exit code."""
    suites = result["suites"]
    assert isinstance(suites, dict)
    if command.charts is not None:
        print(*(f"chart: {path}" for path in draw_charts(suites, command.charts)), sep="\n")
    if bench.skipped:
        print(f"\nleft out, --max-seconds {command.options.max_seconds}: {'; '.join(bench.skipped)}")
    whole = {**result, "results": list(bench.runs.values()), "skipped": bench.skipped}
    if command.json is not None:
        command.json.write_text(json.dumps(rounded(whole), indent=1) + "\n")
    others = [*suites.get("context", []), *suites.get("zero", [])]
    refused = [row for row in [*bench.runs.values(), *others] if "refused" in row]
    for row in refused:
        print(f"REFUSED: K = {row['num_speculative_tokens']}, batch {row['batch']}: {row['refused']}")
    print(json.dumps(rounded(whole)))
    if refused:
        raise SystemExit(1)
