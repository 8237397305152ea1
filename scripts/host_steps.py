"""What does a step cost the host, by the number of requests? On a CPU; nothing is computed.

    OMP_NUM_THREADS=1 python -m scripts.host_steps --batches 64,256 --json FILE

The requests of `specdec bench --suite loop` with the bundled pair, but no kernel is launched: the
results of a step are random tokens, of which a random number is accepted. What is left is what the
host does while a GPU computes, except for its launches: schedule a step, read its results, and give
the requests their tokens.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import torch

from specdec.bench.bench import Bench
from specdec.bench.loop import jobs
from specdec.bench.pair import EngineSpec, Pair, load_pair
from specdec.bench.report import Row, table, write_json
from specdec.runner import Runner
from specdec.step import Acts
from specdec.stepping.logprobs import RecordedLogprobs
from specdec.stepping.step_sizes import Step

MAX_TOKENS = 160
TEMPERATURE = 0.8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("-k", "--num-speculative-tokens", default="0,2")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args()


def random_results(acts: Acts, step: Step) -> None:
    """In place of a step: tokens, how many were accepted, the drafts and their number."""
    rows = acts.buffers.results[: step.num_reqs]
    Q = acts.buffers.sampled_tokens.shape[1]
    rows.copy_(torch.randint(3, 1000, rows.shape))
    rows[:, Q] = torch.randint(0, Q, (len(rows),))
    rows[:, Q + 1 + acts.buffers.verified_tokens.shape[1]] = Q - 1
    acts.results.send(step.num_reqs, RecordedLogprobs())


def measured(pair: Pair, batch: int, K: int, repeats: int) -> Row:
    """Of as many steps as plain decoding takes for a request."""
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=batch,
        max_tokens=2 * MAX_TOKENS,
        max_model_len=512,
        enforce_eager=True,
    )
    engine = pair.engine(spec)
    bench = SimpleNamespace(pair=pair, options=SimpleNamespace(max_tokens=MAX_TOKENS))
    waiting = jobs(cast(Bench, bench), batch, TEMPERATURE)
    num_running = 0

    def steps() -> float:
        """Seconds; what begins requests does not count."""
        nonlocal num_running
        seconds = 0.0
        for _ in range(MAX_TOKENS):
            engine.add_requests(next(waiting) for _ in range(batch - num_running))
            began = time.perf_counter()
            changed = engine.step()
            seconds += time.perf_counter() - began
            num_running = batch - sum(request.is_finished for request in changed)
        return seconds

    steps()
    best = min(steps() for _ in range(repeats)) / MAX_TOKENS
    engine.abort_all()
    return {
        "num_speculative_tokens": K,
        "batch": batch,
        "ms_a_step": 1e3 * best,
        "us_a_request": 1e6 * best / batch,
    }


def rows(args: argparse.Namespace) -> Iterator[Row]:
    pair = load_pair("demo", "demo", "cpu", "auto")
    for K in map(int, args.num_speculative_tokens.split(",")):
        for batch in map(int, args.batches.split(",")):
            yield measured(pair, batch, K, args.repeats)


def main() -> None:
    args = parse_args()
    nothing = patch.object(Runner, "start_rows", lambda *given: None)
    with nothing, patch.object(Acts, "run", random_results):
        found = list(rows(args))
    print(table(found))
    write_json("scripts.host_steps", {"rows": found}, args.json)


if __name__ == "__main__":
    main()
