"""`specdec bench`: a card, a table per suite, one last line of JSON, and charts on request."""

import json
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from specdec.bench.bench import Bench, BenchOptions
from specdec.bench.card import card, measure_bandwidth
from specdec.bench.charts import caption, draw_charts
from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import card_lines, tables
from specdec.bench.suites import SUITES
from specdec.cli.bench_choices import BenchChoices, chosen
from specdec.cli.figures import note_seed
from specdec.cli.threads import choose_threads

THREADS_LEN = 128  # context of the engine that chooses the number of threads


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found so far. Rows, seconds and errors are by suite."""

    command: str
    card: dict[str, object]
    suites: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def default_batches(device: str) -> tuple[int, ...]:
    """Return what the protocol says, or what a CPU has time for."""
    is_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return (1, 8, 32) if is_gpu else (1,)


def run_bench(command: BenchChoices) -> None:
    """Measure, print, write. Exit code 1 if outputs differ or a suite fails."""
    names = chosen(command.suites)
    pair = _load(command)
    bandwidth = measure_bandwidth(pair.device)
    bench = Bench(pair, bandwidth, suite_options(command))
    machine = {"host": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    lengths = {"max_model_len": bench.options.model_len}
    settings = {**asdict(bench.options), **lengths, **machine}
    found = Found(command.command, card(pair, bandwidth, **settings))
    print(card_lines(found.card), flush=True)
    for name in names:
        if bench.has_time(name):
            _run_suite(name, bench, found, command)
        _save(command, bench, found)
    _finish(command, bench, found)


def suite_options(command: BenchChoices) -> BenchOptions:
    """Collect what was given; the rest is left to the suites."""
    values = {each.name: getattr(command, each.name) for each in fields(BenchOptions)}
    given = {name: value for name, value in values.items() if value is not None}
    return BenchOptions(**{"batches": default_batches(command.device), **given})


def _load(command: BenchChoices) -> Pair:
    engine: dict[str, Any] = {"enforce_eager": command.enforce_eager}
    if command.gpu_memory_utilization is not None:
        engine["gpu_memory_utilization"] = command.gpu_memory_utilization
    pair = load_pair(
        command.target,
        command.eagle,
        command.device,
        command.dtype,
        command.prompts,
        seed=command.seed,
        **engine,
    )
    note_seed(command.seed, temperature=0)
    K = max(suite_options(command).ks) if pair.eagle is not None else 0
    spec = EngineSpec(num_speculative_tokens=K, max_num_seqs=1, max_model_len=THREADS_LEN)
    if pair.device.type == "cpu":
        choose_threads(pair.engine(spec).runner)
        pair.drop(spec)
    return pair


def _run_suite(name: str, bench: Bench, found: Found, command: BenchChoices) -> None:
    """Report a suite that fails, with the rows that it has; the others still run."""
    start = time.monotonic()
    rows = found.suites[name] = []
    try:
        for row in SUITES[name](bench):
            rows.append(row)
            _save(command, bench, found)
    except ValueError as error:  # what was asked for cannot be measured
        found.failed[name] = command.wording.line(error)
    except (RuntimeError, AttributeError, TypeError) as error:
        traceback.print_exc()
        found.failed[name] = f"{type(error).__name__}: {error}"
    found.seconds[name] = time.monotonic() - start
    if not rows and name in found.failed:
        return
    text = tables(rows) if rows else "nothing to measure on this device"
    what, _, _ = (SUITES[name].__doc__ or "").partition("\n")
    print(f"\n{name} ({found.seconds[name]:.0f} s): {what}\n{text}", flush=True)


def _save(command: BenchChoices, bench: Bench, found: Found) -> None:
    """Write the whole file after each row: the run may be cut short at any time."""
    if command.json is not None:
        partial = command.json.with_name(command.json.name + ".partial")
        partial.write_text(json.dumps(_whole(bench, found), indent=1) + "\n")
        partial.replace(command.json)


def rounded(value: object) -> object:
    """Keep six digits of floats: more were not measured."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _whole(bench: Bench, found: Found) -> object:
    """Gather the content of the JSON."""
    return rounded(
        {**asdict(found), "results": list(bench.runs.values()), "skipped": bench.skipped}
    )


def _finish(command: BenchChoices, bench: Bench, found: Found) -> None:
    """Draw charts, say what went wrong, print the line of JSON, set the exit code."""
    if command.charts is not None:
        charts = draw_charts(found.suites, command.charts, caption([found.card]))
        print(*(f"chart: {path}" for path in charts), sep="\n")
    if bench.skipped:
        skipped = "; ".join(bench.skipped)
        limit = bench.options.max_seconds
        print(f"\nleft out{'' if limit is None else f', --max-seconds {limit}'}: {skipped}")
    names = ("context", "loop", "noise", "trees")
    apart = [row for name in names for row in found.suites.get(name, [])]
    rows = [*bench.runs.values(), *apart]
    refused = [row for row in rows if "refused" in row]
    for row in refused:
        K = row["num_speculative_tokens"]
        batch = row["batch"]
        print(f"REFUSED: K = {K}, batch {batch}: {row['refused']}")
    for name, error in found.failed.items():
        print(f"FAILED: {name}: {error}")
    print(json.dumps(_whole(bench, found)))
    if refused or found.failed:
        raise SystemExit(1)
