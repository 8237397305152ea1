"""`specdec bench`: a card, a table per suite, and one last line of JSON; charts where they are wanted."""

import json
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
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
    """The command line as given, as one text too: `command`. json, charts: where to write."""

    command: str
    target: str
    draft: str | None
    suites: tuple[str, ...]
    options: BenchOptions
    prompts: Path | None
    dtype: str
    device: str
    json: Path | None
    charts: Path | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has brought so far. Rows, seconds and errors are by suite."""

    command: str
    card: dict[str, object]
    suites: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_bench(command: BenchCommand) -> None:
    """Measure, print, write. Exit code 1 if an output differed from plain decoding, or a suite failed."""
    names = chosen(command.suites)
    _check_places(command)
    pair = load_pair(command.target, command.draft, command.device, command.dtype, command.prompts)
    bandwidth = measure_bandwidth(pair.device)
    bench = Bench(pair, bandwidth, command.options)
    settings = {
        **asdict(command.options),
        "host": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    found = Found(command.command, card(pair, bandwidth, **settings))
    print(card_lines(found.card), flush=True)
    for name in names:
        if bench.has_time(name):
            _run_suite(name, bench, found)
        if command.json is not None:  # now, because whoever waits may not wait for the rest
            command.json.write_text(json.dumps(_whole(bench, found), indent=1) + "\n")
    _finish(command, bench, found)


def _check_places(command: BenchCommand) -> None:
    """Before anything is measured: what it is to be written to, and by what."""
    if command.json is not None and not command.json.parent.is_dir():
        raise ValueError(f"--json {command.json}: there is no directory {command.json.parent}")
    if command.json is not None and command.json.is_dir():
        raise ValueError(f"--json {command.json}: a directory; give a file")
    if command.charts is not None and find_spec("matplotlib") is None:
        raise ValueError(
            f"--charts {command.charts}: charts need matplotlib: pip install matplotlib"
        )


def _run_suite(name: str, bench: Bench, found: Found) -> None:
    """A suite that fails is said to have failed; the others still run."""
    start = time.monotonic()
    try:
        found.suites[name] = SUITES[name](bench)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        traceback.print_exc()
        found.failed[name] = f"{type(error).__name__}: {error}"
        return
    found.seconds[name] = time.monotonic() - start
    text = table(found.suites[name]) if found.suites[name] else "nothing to measure on this device"
    print(f"\n{name} ({found.seconds[name]:.0f} s): {SUITES[name].__doc__}\n{text}", flush=True)


def chosen(names: tuple[str, ...]) -> list[str]:
    """In the order of SUITES, in which an engine is used as long as it is there."""
    unknown = [name for name in names if name not in (*SUITES, "all")]
    if unknown:
        raise ValueError(f"--suite {unknown[0]}: allowed are all, {', '.join(SUITES)}")
    return [name for name in SUITES if name in names or "all" in names]


def refuse_unread(
    suites: tuple[str, ...],
    draft: str | None,
    ks: str | None,
    contexts: str | None,
    rounds_of_memory: int | None,
) -> None:
    """ValueError for options that no suite of this run would read."""
    if draft is None and ks is not None and ks != "0":
        raise ValueError(f"--num-speculative-tokens {ks} without a draft: give --draft too")
    names = chosen(suites)
    for option, value, suite in (
        ("contexts", contexts, "context"),
        ("rounds-of-memory", rounds_of_memory, "memory"),
    ):
        if value is not None and suite not in names:
            raise ValueError(
                f"--{option} {value} is for the suite {suite} alone: give --suite {suite} too"
            )


def default_batches(device: str) -> str:
    """What the protocol says, and what a CPU has time for."""
    return (
        "1,8,32"
        if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        else "1"
    )


def rounded(value: object) -> object:
    """Floats with six digits: no more of them were measured."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def integers(option: str, text: str, least: int = 0, most: int | None = None) -> tuple[int, ...]:
    """ "0,3,5" as numbers."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text}: give whole numbers with commas between them") from None
    if any(value < least or (most is not None and value > most) for value in values):
        raise ValueError(
            f"{option} {text}: give numbers of at least {least}{'' if most is None else f', at most {most}'}"
        )
    return values


def _whole(bench: Bench, found: Found) -> object:
    """What goes to JSON."""
    return rounded(
        {**asdict(found), "results": list(bench.runs.values()), "skipped": bench.skipped}
    )


def _finish(command: BenchCommand, bench: Bench, found: Found) -> None:
    """Charts, what went wrong, the line of JSON, the exit code."""
    if command.charts is not None:
        print(*(f"chart: {path}" for path in draw_charts(found.suites, command.charts)), sep="\n")
    if bench.skipped:
        print(
            f"\nleft out, --max-seconds {command.options.max_seconds}: {'; '.join(bench.skipped)}"
        )
    refused = [
        row for row in [*bench.runs.values(), *found.suites.get("context", [])] if "refused" in row
    ]
    for row in refused:
        print(
            f"REFUSED: K = {row['num_speculative_tokens']}, batch {row['batch']}: {row['refused']}"
        )
    for name, error in found.failed.items():
        print(f"FAILED: {name}: {error}")
    print(json.dumps(_whole(bench, found)))
    if refused or found.failed:
        raise SystemExit(1)
