"""Do the masks of guided requests delay a round on a GPU?

    python -m scripts.guided_trace /tmp/8b/target --draft /tmp/8b/eagle3 --json FILE
    python -m scripts.guided_trace --batch 32 -k 5

As many guided requests as --batch run at all times, under the JSON schemas of
tests/e2e/guided_cases.py. The device's clock is read before and after the masks of each step: as
long as the host has them before the target's forward has ended, nothing lies between the two
marks, and the device never waits.

Prints a table, one row for steps without prompts and one for those with; the steps in which the
device waited longest; and a line of JSON. Of such a step the second table says, in milliseconds of
the host: when the drafts had arrived, when the last walk began after that, what the slowest walk
took, in time and of a processor, what all walks took of a processor, and on how many threads; when
the masks were there, and for how long the device waited; whether the device had done the forward
before the drafts were seen, so that the host was late; in which step after one with prompts it was,
0 being that one; and the rounds so far of its youngest guided request.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from specdec import LLM, SamplingParams
from specdec.bench.report import Row, table, write_json
from specdec.guided.grammars import Matcher
from specdec.guided.step_masks import StepMasks
from specdec.requests.request import Request
from specdec.scheduling.work import Work
from specdec.stepping.results import PendingResult, Proposals
from specdec.stepping.row_masks import RowMasks
from tests.e2e.guided_cases import SCHEMAS

PROMPT = "Question: give one value as JSON.\nAnswer: "
WARMUP = 8  # steps that do not count
MOST_SHOWN = 16


class WalkTime(NamedTuple):
    """A walk of a guide, seconds. began: by time.perf_counter()."""

    began: float
    wall: float
    processor: float
    thread: int


@dataclass(slots=True)
class Masks:
    """Of one step: when the device was there, and when the host. Seconds by perf_counter."""

    has_prompts: bool
    steps_since_prompts: int
    youngest: int  # the fewest rounds that a guided request has had before
    before: torch.cuda.Event
    after: torch.cuda.Event
    began: float = 0.0
    drafts_came: float = 0.0  # 0 if no slot verifies
    is_late: bool = False
    ended: float = 0.0
    num_rows: int = 0
    walks: list[WalkTime] = field(default_factory=list)

    @property
    def wait_ms(self) -> float:
        """How long the device waited for the masks."""
        return float(self.before.elapsed_time(self.after))

    @property
    def host_ms(self) -> float:
        """From the drafts on."""
        return 1e3 * (self.ended - (self.drafts_came or self.began))

    @property
    def walks_ms(self) -> float:
        """Of a processor."""
        return 1e3 * sum(walk.processor for walk in self.walks)

    def row(self) -> Row:
        drafts_came = self.drafts_came or self.began
        slowest = max(self.walks, key=lambda walk: walk.wall)
        return {
            "with prompts": self.has_prompts,
            "steps since prompts": self.steps_since_prompts,
            "youngest": self.youngest,
            "host late": self.is_late,
            "drafts ms": 1e3 * (drafts_came - self.began),
            "last walk began ms": 1e3 * (max(walk.began for walk in self.walks) - drafts_came),
            "slowest walk ms": 1e3 * slowest.wall,
            "of a processor ms": 1e3 * slowest.processor,
            "all walks ms": self.walks_ms,
            "threads": len({walk.thread for walk in self.walks}),
            "masks ms": self.host_ms,
            "device waits ms": self.wait_ms,
        }


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
    with recorded_masks() as recorded:
        llm.generate([PROMPT] * args.num_requests, list(params(args)), use_tqdm=False)
    torch.cuda.synchronize()
    steps = recorded[WARMUP:]
    rows = list(figures(steps))
    print(table(rows))
    waiting = sorted(steps, key=lambda each: each.wait_ms, reverse=True)[:MOST_SHOWN]
    longest = [each.row() for each in waiting]
    print(table(longest))
    card = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found = {
        **vars(args),
        "target": str(args.target),
        "card": card,
        "results": rows,
        "longest": longest,
    }
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


@contextmanager
def recorded_masks() -> Iterator[list[Masks]]:
    """What each step of guided requests adds to."""
    recorded: list[Masks] = []
    of_step, read_proposals = StepMasks.of_step, PendingResult.read_proposals

    def recording(
        self: StepMasks, work: Work, num_drafts: Callable[[Request], int]
    ) -> Callable[[], RowMasks] | None:
        before = recorded[-1].steps_since_prompts if recorded else 0
        since = 0 if work.parts else before + 1
        youngest = min((each.stats.num_rounds for each in work.verifying), default=0)
        step = Masks(bool(work.parts), since, youngest, _mark(), _mark())
        # beside prompts the walks begin here, before the step is launched
        recorded.append(step)
        walks.clear()
        step.began = time.perf_counter()
        masks = of_step(self, work, num_drafts)
        if masks is None:
            recorded.pop()
            return None
        return partial(record, step, masks)

    def record(step: Masks, masks: Callable[[], RowMasks]) -> RowMasks:
        step.before.record()
        if not step.has_prompts:
            step.began = time.perf_counter()
        found = masks()
        step.ended = time.perf_counter()
        step.after.record()
        step.num_rows = len(found.row_X)
        step.walks = list(walks)
        return found

    def reading(self: PendingResult) -> Proposals:
        found = read_proposals(self)
        recorded[-1].drafts_came = time.perf_counter()
        # beside prompts the launch has not come to the mark yet
        has_mark = not recorded[-1].has_prompts
        recorded[-1].is_late = has_mark and recorded[-1].before.query()  # type: ignore[no-untyped-call]
        return found

    with ExitStack() as stack:
        stack.enter_context(patch.object(StepMasks, "of_step", recording))
        stack.enter_context(patch.object(PendingResult, "read_proposals", reading))
        walks = stack.enter_context(recorded_walks())
        yield recorded


@contextmanager
def recorded_walks() -> Iterator[list[WalkTime]]:
    """The walks of all threads, as they end."""
    found: list[WalkTime] = []
    masks = Matcher.masks

    def timed(self: Matcher, drafts: Sequence[int]) -> list[bytes]:
        began, processor = time.perf_counter(), time.thread_time()
        result = masks(self, drafts)
        wall = time.perf_counter() - began
        processor = time.thread_time() - processor
        found.append(WalkTime(began, wall, processor, threading.get_ident()))
        return result

    with patch.object(Matcher, "masks", timed):
        yield found


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
            "masks ms p50": float(np.percentile(host, 50)),
            "masks ms p99": float(np.percentile(host, 99)),
            "all walks ms p50": float(np.percentile([each.walks_ms for each in steps], 50)),
            "all walks ms p99": float(np.percentile([each.walks_ms for each in steps], 99)),
            "slowest walk ms": 1e3 * max(walk.wall for each in steps for walk in each.walks),
            "device waits ms p50": float(np.percentile(waits, 50)),
            "device waits ms p99": float(np.percentile(waits, 99)),
            "device waits ms max": max(waits),
            "steps that wait 0.05 ms": sum(wait > 0.05 for wait in waits),
            "of a request's first 3": sum(
                each.wait_ms > 0.05 and each.youngest < 3 for each in steps
            ),
        }


if __name__ == "__main__":
    main()
