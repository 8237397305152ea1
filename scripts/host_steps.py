"""What does a step cost the host, by the number of requests? On a CPU; nothing is computed.

    OMP_NUM_THREADS=1 python -m scripts.host_steps --batches 64,256 --json FILE
    OMP_NUM_THREADS=1 python -m scripts.host_steps --batches 8 -k 5,auto

The requests of `specdec bench --suite loop` with the bundled pair, but no kernel is launched: the
results of a step are random tokens, of which a random number is accepted. What is left is what the
host does while a GPU computes, except for its launches: schedule a step, read its results, and give
the requests their tokens. With "auto" it also plans the next round, by costs that are about those
of an 8B pair on an H200.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import numpy as np
import torch

from scripts.soak import rows_are_shared
from specdec.bench.bench import Bench
from specdec.bench.loop import jobs
from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import Row, table, write_json
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.runner import Runner
from specdec.scheduling.step_costs import RoundCosts, TreeCosts
from specdec.start.speculation import AUTO_TREE
from specdec.step import Acts
from specdec.stepping.buffers import CONFIDENCE_ONE
from specdec.stepping.logprobs import RecordedLogprobs
from specdec.stepping.step_sizes import Step

MAX_TOKENS = 160
TEMPERATURE = 0.8
PROBABLE = CONFIDENCE_ONE // 2  # each draft, given that those before it hold
ROWS = (1, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024, 2048)
COSTS = RoundCosts(
    verify=tuple((rows, 4.6 + 0.004 * rows) for rows in ROWS),
    mixed=tuple((rows, 4.7 + 0.006 * rows) for rows in ROWS),
    plain=((1, 4.0), (8, 4.2), (64, 5.5), (256, 8.0)),
    level=((8, 0.2), (64, 0.3), (256, 0.5)),
    ms_per_key=2e-5,
    skipped_ms=0.02,
    tree=TreeCosts(
        all_levels=((1, 5.3), (8, 5.7)), one_level=((1, 4.6), (8, 4.9)), shape=AUTO_TREE
    ),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("-k", "--num-speculative-tokens", default="0,2", help='or "auto"')
    parser.add_argument("--repeats", type=int, default=5, help="their median counts")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args()


def random_results(acts: Acts, step: Step) -> None:
    """In place of a step: tokens, how many were accepted, and the drafts."""
    buffers = acts.buffers
    rows = buffers.results[: step.num_reqs]
    rows.copy_(torch.randint(3, 1000, rows.shape))
    Q = buffers.sampled_tokens.shape[1]
    num_drafts = buffers.verified_tokens.shape[1]
    if step.verifies_trees:
        assert buffers.tree is not None
        num_drafts = buffers.tree.shape.num_nodes
    first = Q + 1 + num_drafts  # their number, then what the planner learns from
    of_each = step.query_len
    if step.shared_rows:
        of_each = min(step.shared_rows // step.num_reqs, Q)
    num_verified = max(of_each - 1, 0)
    rows[:, Q] = torch.randint(0, min(num_verified, 3) + 1, (len(rows),))
    rows[:, first] = num_verified
    if step.verifies_trees:  # chains: each node's parent is the node before it
        nodes = torch.arange(num_drafts)
        rows[:, first + 1 :][:, :num_drafts] = torch.where(nodes < num_verified, nodes, -1)
        rows[:, first + 1 + num_drafts :][:, :num_drafts] = PROBABLE >> nodes.clamp(max=12)
    else:
        rows[:, first + 1 :] = PROBABLE
    acts.results.send(step.num_reqs, RecordedLogprobs(), step.verifies_trees)


def engine_of(pair: Pair, batch: int, drafts: str) -> Engine:
    """drafts: a number, or "auto", which has no costs of its own on a CPU."""
    if drafts == "auto":
        speculation = {"model": "demo", "num_speculative_tokens": "auto", "adaptive": True}
        with rows_are_shared(COSTS):
            return LLM("demo", speculation, max_num_seqs=batch, max_model_len=512).engine
    spec = EngineSpec(
        num_speculative_tokens=int(drafts),
        max_num_seqs=batch,
        max_tokens=2 * MAX_TOKENS,
        max_model_len=512,
        enforce_eager=True,
    )
    return pair.engine(spec)


def measured(pair: Pair, batch: int, drafts: str, repeats: int) -> Row:
    """Of as many steps as plain decoding takes for a request."""
    engine = engine_of(pair, batch, drafts)
    bench = SimpleNamespace(pair=pair, options=SimpleNamespace(max_tokens=MAX_TOKENS))
    waiting = jobs(cast(Bench, bench), batch, TEMPERATURE)
    num_running = 0

    def steps() -> dict[bool, list[float]]:
        """Seconds of steps in which requests begin, and of others; not of what begins them."""
        nonlocal num_running
        torch.manual_seed(0)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(MAX_TOKENS):
            num_new = batch - num_running
            engine.add_requests(next(waiting) for _ in range(num_new))
            began = time.perf_counter()
            changed = engine.step()
            seconds[num_new > 0].append(time.perf_counter() - began)
            num_running = batch - sum(request.is_finished for request in changed)
        return seconds

    steps()
    runs = [steps() for _ in range(repeats)]
    engine.abort_all()
    seconds = np.median([sum(run[True]) + sum(run[False]) for run in runs]) / MAX_TOKENS
    with_prompts = [np.mean(run[True]) for run in runs if run[True]]
    return {
        "num_speculative_tokens": drafts if drafts == "auto" else int(drafts),
        "batch": batch,
        "ms_a_step": 1e3 * seconds,
        "us_a_request": 1e6 * seconds / batch,
        "ms_with_prompts": 1e3 * float(np.median(with_prompts)) if with_prompts else None,
    }


def rows(args: argparse.Namespace) -> Iterator[Row]:
    pair = load_pair("demo", "demo", "cpu", "auto")
    for drafts in args.num_speculative_tokens.split(","):
        for batch in map(int, args.batches.split(",")):
            yield measured(pair, batch, drafts, args.repeats)


def main() -> None:
    args = parse_args()
    nothing = patch.object(Runner, "start_rows", lambda *given: None)
    with nothing, patch.object(Acts, "run", random_results):
        found = list(rows(args))
    print(table(found))
    write_json("scripts.host_steps", {"rows": found}, args.json)


if __name__ == "__main__":
    main()
