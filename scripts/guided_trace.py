"""Do the masks of guided requests delay a round on a GPU?

    python -m scripts.guided_trace /tmp/8b/target --draft /tmp/8b/eagle3 --json FILE
    python -m scripts.guided_trace --batch 32 -k 5

As many guided requests as --batch run at all times, under the JSON schemas of
tests/e2e/guided_cases.py. The device's clock is read before and after the masks of each step: as
long as the host has them before the target's forward has ended, nothing lies between the two
marks, and the device never waits.

Prints a table, one row for steps without prompts and one for those with, and a line of JSON.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec import LLM, SamplingParams
from specdec.bench.report import Row, table, write_json
from specdec.runner import Runner
from specdec.stepping.row_masks import RowMasks
from tests.e2e.guided_cases import SCHEMAS

PROMPT = "Question: give one value as JSON.\nAnswer: "
WARMUP = 8  # steps that do not count


@dataclass(frozen=True, slots=True)
class Masks:
    """Of one step: when the device was there, and how long the host took."""

    has_prompts: bool
    num_rows: int
    host_ms: float
    before: torch.cuda.Event
    after: torch.cuda.Event

    @property
    def wait_ms(self) -> float:
        """How long the device waited for the masks."""
        return float(self.before.elapsed_time(self.after))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="demo")
    parser.add_argument("--draft", help="default: demo's, for demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    args = parser.parse_args()
    args.draft = args.draft or ("demo" if args.target == "demo" else None)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and a CPU waits for every mask")
    return args


def main() -> None:
    args = parse_args()
    speculation = {"model": args.draft, "num_speculative_tokens": args.num_speculative_tokens}
    llm = LLM(
        args.target,
        speculation if args.draft else None,
        max_num_seqs=args.batch,
        max_model_len=1024,
    )
    recorded = record_masks(llm.engine.runner)
    llm.generate([PROMPT] * args.num_requests, list(params(args)), use_tqdm=False)
    torch.cuda.synchronize()
    rows = list(figures(recorded[WARMUP:]))
    print(table(rows))
    card = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found = {**vars(args), "target": str(args.target), "card": card, "results": rows}
    write_json("scripts.guided_trace", found, args.json)


def params(args: argparse.Namespace) -> Iterator[SamplingParams]:
    """Greedy and sampled in turn, under one schema after another."""
    for i, schema in enumerate(islice(cycle(SCHEMAS.values()), args.num_requests)):
        yield SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=args.max_tokens,
            structured_outputs={"json": schema},
        )


def record_masks(runner: Runner) -> list[Masks]:
    """What the steps from now on add to."""
    recorded: list[Masks] = []
    run_step = runner.run_step

    def recording(*given: Any, masks: Callable[[], RowMasks] | None, **more: Any) -> Any:
        parts = given[1] if len(given) > 1 else ()
        return run_step(*given, masks=masks and (lambda: record(masks, bool(parts))), **more)

    def record(masks: Callable[[], RowMasks], has_prompts: bool) -> RowMasks:
        before, after = (_mark() for _ in range(2))
        before.record()
        began = time.perf_counter()
        found = masks()
        host_ms = 1e3 * (time.perf_counter() - began)
        after.record()
        recorded.append(Masks(has_prompts, len(found.row_X), host_ms, before, after))
        return found

    setattr(runner, "run_step", recording)  # noqa: B010
    return recorded


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def figures(recorded: Sequence[Masks]) -> Iterator[Row]:
    for has_prompts in (False, True):
        steps = [each for each in recorded if each.has_prompts == has_prompts]
        if not steps:
            continue
        waits = [each.wait_ms for each in steps]
        host = [each.host_ms for each in steps]
        yield {
            "steps": "with prompts" if has_prompts else "rounds",
            "count": len(steps),
            "rows masked": sum(each.num_rows for each in steps) / len(steps),
            "host ms p50": float(np.percentile(host, 50)),
            "host ms p99": float(np.percentile(host, 99)),
            "device waits ms p50": float(np.percentile(waits, 50)),
            "device waits ms p99": float(np.percentile(waits, 99)),
            "device waits ms max": max(waits),
            "steps that wait 0.05 ms": sum(wait > 0.05 for wait in waits),
        }


if __name__ == "__main__":
    main()
