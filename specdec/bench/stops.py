"""What it costs to end drafts early, by each of two mechanisms.

device: every level is launched, and reads no weights once no draft goes on; the engine does this.
host: the host reads after each level whether any goes on, and launches another one only then, so
that it cannot prepare the next step meanwhile.

Rounds follow one another and verify all drafts, behind empty contexts; nobody reads their results,
so that the device's way is at its best.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec
from specdec.bench.report import Row
from specdec.bench.rounds import WARMUP
from specdec.bench.timing import Clock, Spread, wrapped
from specdec.runner import Runner
from specdec.start.measure_costs import AT_ONCE, NEVER
from specdec.stepping.step_sizes import Step


def stops(bench: Bench) -> Iterator[Row]:
    """Rounds of the largest K whose drafts never stop or all stop at once; on a GPU."""
    levels, batches = max(bench.ks), bench.options.batches
    is_captured = bench.pair.device.type == "cuda" and not bench.pair.config.enforce_eager
    if levels < 2 or not is_captured or not bench.has_time("stops"):
        return
    spec = EngineSpec(
        num_speculative_tokens=levels,
        max_num_seqs=max(*batches, bench.options.max_num_seqs or 1),
        max_model_len=bench.options.model_len,
        is_adaptive=True,
    )
    runner = bench.pair.engine(spec).runner
    for batch, stopped_by, drafted in product(batches, ("device", "host"), (levels, 1)):
        spread = time_stops(runner, batch, stopped_by, drafted, bench.options.num_rounds)
        yield {
            "stopped_by": stopped_by,
            "batch": batch,
            "levels": levels,
            "drafted": drafted,
            "ms": spread.median,
            "low": spread.low,
            "high": spread.high,
        }
    bench.pair.drop(spec)


def time_stops(
    runner: Runner, num_reqs: int, stopped_by: str, drafted: int, num_rounds: int
) -> Spread:
    """Milliseconds of a round of padding, one after another; drafted: 1, or all levels.

    The runner's number of levels varies, and its drafts may stop.
    """
    wanted = num_reqs * runner.sizes.query_len
    shapes = [rows for requests, rows in runner.graphs.shapes if requests >= num_reqs]
    rows = min((rows for rows in shapes if rows >= wanted), default=max(shapes))
    run = partial(
        runner.run_step,
        [-1] * num_reqs,
        max_num_computed=runner.sizes.max_model_len,
        query_len=runner.sizes.query_len,
        shared_rows=rows,
        num_levels=runner.sizes.num_speculative_tokens,
    )
    by_host = stopped_by_host(runner) if stopped_by == "host" else nullcontext()
    with runner.stopping_below(AT_ONCE if drafted == 1 else NEVER), by_host:
        return Clock(runner.device).repeat(run, num_rounds, WARMUP)


@contextmanager
def stopped_by_host(runner: Runner) -> Iterator[None]:
    """In the body levels of chains are launched one by one, while drafts go on."""
    draft = runner.acts.draft
    assert draft is not None, "an engine without a draft"
    decode = draft.decode

    def decode_while_needed(step: Step) -> None:
        for _ in range(1, step.num_levels or 0):
            if not runner.buffers.num_going.item():
                return
            decode(replace(step, num_levels=2))  # one more than the prefill has proposed

    with wrapped(draft, ["decode"], lambda _: lambda decode: decode_while_needed):
        yield
