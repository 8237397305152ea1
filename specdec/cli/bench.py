"""`specdec bench`: a card, a table per suite, one last line of JSON, and charts on request."""

import json
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from specdec.bench.bench import Bench
from specdec.bench.charts import caption, draw_charts
from specdec.bench.pair import EngineSpec, card, load_pair
from specdec.bench.report import card_lines, tables
from specdec.bench.suites import SUITES
from specdec.bench.timing import measure_bandwidth
from specdec.cli.bench_choices import BenchChoices, chosen
from specdec.cli.figures import note_seed
from specdec.cli.threads import choose_threads
from specdec.start.speculation import Drafting

THREADS_LEN = 128  # context of the engine that chooses the number of threads


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found so far. Rows, seconds and errors are by suite."""

    command: str
    card: dict[str, object]
    suites: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_bench(options: BenchChoices) -> None:
    """Measure, print, write. Exit code 1 if outputs differ or a suite fails."""
    pair = load_pair(
        options.target,
        options.eagle,
        options.device,
        options.dtype,
        options.prompts,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel_size,
        draft_tensor_parallel_size=options.draft_tensor_parallel_size,
    )
    note_seed(options.seed, temperature=0)
    bench = Bench(pair, 0.0, options.measured)
    bench.check_draft()
    if pair.device.type == "cpu":
        drafting = Drafting(max(bench.ks))
        spec = EngineSpec(drafting=drafting, max_num_seqs=1, max_model_len=THREADS_LEN)
        choose_threads(pair.engine(spec).runner)
        pair.drop(spec)
    bench.bandwidth = measure_bandwidth(pair.device)
    settings = {
        **asdict(options.measured),
        **{"ks": bench.ks, "batches": bench.batches, "contexts": bench.contexts},
        "max_model_len": options.measured.model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "draft_tensor_parallel_size": options.draft_tensor_parallel_size,
        "host": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    found = Found(options.command, card(pair, bench.bandwidth, **settings))
    print(card_lines(found.card), flush=True)
    for name in chosen(options.suite):
        if bench.has_time(name):
            _run_suite(name, bench, found, options)
        _save(options, bench, found)
    _finish(options, bench, found)


def _run_suite(name: str, bench: Bench, found: Found, options: BenchChoices) -> None:
    """Report a suite that fails, with the rows that it has; the others still run."""
    start = time.monotonic()
    rows = found.suites[name] = []
    try:
        for row in SUITES[name](bench):
            rows.append(row)
            _save(options, bench, found)
    except ValueError as error:  # what was asked for cannot be measured
        found.failed[name] = options.wording.line(error)
    except (RuntimeError, AttributeError, TypeError) as error:
        traceback.print_exc()
        found.failed[name] = f"{type(error).__name__}: {error}"
    found.seconds[name] = time.monotonic() - start
    if rows or name not in found.failed:
        text = tables(rows) if rows else "nothing to measure on this device"
        what, _, _ = (SUITES[name].__doc__ or "").partition("\n")
        print(f"\n{name} ({found.seconds[name]:.0f} s): {what}\n{text}", flush=True)


def _save(options: BenchChoices, bench: Bench, found: Found) -> None:
    """Write the whole file after each row: the run may be cut short at any time."""
    if options.json is not None:
        partial = options.json.with_name(options.json.name + ".partial")
        partial.write_text(json.dumps(_whole(bench, found), indent=1) + "\n")
        partial.replace(options.json)


def rounded(value: object) -> object:
    """Keep six digits of floats: more were not measured."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _whole(bench: Bench, found: Found) -> object:
    return rounded({**asdict(found), "results": bench.results, "skipped": bench.skipped})


def _finish(options: BenchChoices, bench: Bench, found: Found) -> None:
    if options.charts is not None:
        for path in draw_charts(found.suites, options.charts, caption([found.card])):
            print(f"chart: {path}")
    if bench.skipped:
        limit = options.measured.max_seconds
        shown = "" if limit is None else f", --max-seconds {limit}"
        print(f"\nleft out{shown}: {'; '.join(bench.skipped)}")
    names = ("context", "loop", "noise", "drafts", "trees")
    apart = [row for name in names for row in found.suites.get(name, [])]
    refused = [row for row in [*bench.results, *apart] if "refused" in row]
    for row in refused:
        run = f"K = {row['num_speculative_tokens']}, batch {row['batch']}"
        print(f"REFUSED: {run}: {row['refused']}")
    for name, error in found.failed.items():
        print(f"FAILED: {name}: {error}")
    print(json.dumps(_whole(bench, found)))
    if refused or found.failed:
        raise SystemExit(1)
