"""How long do the steps of a loop take, by what they verify and what the step before drafted?

    python -m scripts.step_times /tmp/8b/target --draft /tmp/8b/eagle3 --adaptive --batch 2

The requests of `specdec bench --suite loop`, once. A step's time is that from the result before to
its own, by the device's clock where there is one: the draft's levels of the step before, the wait
for the host, and the target. Steps of one kind should take as long wherever they come; where they
do not, the host was late.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import NamedTuple
from unittest.mock import patch

from specdec.bench.bench import Bench, BenchOptions
from specdec.bench.card import Bandwidth
from specdec.bench.loop import engine_spec, jobs, run_loop
from specdec.bench.pair import load_pair
from specdec.bench.report import Row, table, write_json
from specdec.engine import Engine, InFlight
from specdec.requests.request import Request
from specdec.scheduling.work import Work


class Step(NamedTuple):
    """ms: since the result before. num_rows: that verified; num_prompt_rows: beside them."""

    ms: float
    num_rows: int
    num_prompt_rows: int


Steps = dict[tuple[str, str, str], list[Step]]  # by what was verified before, drafted, and verified


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="demo")
    parser.add_argument("--draft", default=None, help='default: "demo" for the target "demo"')
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--adaptive", action="store_true", help="as many as pay, in place of -k")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args()


@contextmanager
def recorded() -> Iterator[Steps]:
    """The steps whose results an engine takes in the body."""
    take = Engine._take
    found: Steps = defaultdict(list)
    before: list[tuple[InFlight, float]] = []

    def taken(engine: Engine, step: InFlight) -> list[Request]:
        changed = take(engine, step)
        now = perf_counter()
        if before:
            earlier, then = before.pop()
            on_device = step.result.ms_after(earlier.result)
            work = step.work
            num_prompt_rows = sum(part.length for part in work.parts)
            ms = 1e3 * (now - then) if on_device is None else on_device
            kind = _kind(earlier.work), _drafted(engine, earlier.work), _kind(work)
            found[kind].append(Step(ms, work.num_verify_rows, num_prompt_rows))
        before.append((step, now))
        return changed

    with patch.object(Engine, "_take", taken):
        yield found


def _kind(work: Work) -> str:
    """What it verified, and whether it computed prompts."""
    if not work.verifying:
        return "prompts"
    drafts = "tree" if work.verifies_trees else "chain" if work.query_len > 1 else "plain"
    return f"{len(work.verifying)} x {drafts}" + " + prompts" * bool(work.parts)


def _drafted(engine: Engine, work: Work) -> str:
    if work.proposes_tree:
        return "tree"
    K = engine.runner.sizes.num_speculative_tokens
    return f"{K if work.num_levels is None else work.num_levels} levels"


def rows_of(steps: Steps) -> list[Row]:
    """Those that took the most time first."""
    ranked = sorted(steps.items(), key=lambda each: -sum(step.ms for step in each[1]))
    return [
        {
            "before": before,
            "drafted": drafted,
            "step": kind,
            "steps": len(found),
            "ms": mean(step.ms for step in found),
            "total_ms": sum(step.ms for step in found),
            "rows": mean(step.num_rows for step in found),
            "prompt_rows": mean(step.num_prompt_rows for step in found),
        }
        for (before, drafted, kind), found in ranked
    ]


def main() -> None:
    args = parse_args()
    draft = args.draft or ("demo" if args.target == "demo" else None)
    pair = load_pair(args.target, draft, args.device, "auto")
    if args.adaptive and pair.eagle is None:
        raise SystemExit("--adaptive: there is no draft; name one with --draft")
    options = BenchOptions(
        ks=(args.num_speculative_tokens,),
        batches=(args.batch,),
        max_tokens=args.max_tokens,
        adaptive=args.adaptive,
    )
    bench = Bench(pair, Bandwidth(reading=0.0, copying=0.0), options)  # which no loop looks at
    drafting = bench.drafting[-1]  # after plain decoding and a fixed number
    engine = pair.engine(engine_spec(bench, drafting))
    requests = jobs(bench, args.batch, args.temperature)
    with recorded() as steps:
        window = run_loop(engine, requests, args.batch)
    found = rows_of(steps)
    print(f"K = {drafting.name}, batch {args.batch}: {window.tokens_per_second:,.0f} tokens/s")
    print(table(found))
    whole = {"num_speculative_tokens": drafting.name, "batch": args.batch, "rows": found}
    write_json("scripts.step_times", whole, args.json)


if __name__ == "__main__":
    main()
