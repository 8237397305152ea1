"""Measure what steps cost on this GPU, by a run or two of some of them at the start.

Every step that a table needs is launched before any time is read; sizes that are not measured
follow from their neighbours (step_times.py).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from specdec.kernels.compilations import compiling_is_expected
from specdec.kernels.tile_shapes import PARALLEL_ROWS, row_class
from specdec.models.experts import rows_adding_experts
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.costs import LEAST_PROMPT_ROWS, Measured, StepCosts, TreeCosts
from specdec.scheduling.work import Round
from specdec.sizes import BLOCK_SIZE, PLAIN, chain
from specdec.start.compile_ahead import prompts, tree_round
from specdec.start.row_counts import lengths_of
from specdec.start.spread import context, doubling
from specdec.start.step_times import (
    Timed,
    apart,
    as_rounds,
    between,
    compute_and_launch_ms,
    of_classes,
)

logger = logging.getLogger("specdec")

SOME_LEVELS = 3  # of which those after the first are timed
NEVER = -1.0  # a threshold below which no draft stops
AT_ONCE = 2.0  # one below which all stop after one level
LONG_CONTEXT = 4096
AS_NEXT = (448,)  # classes of rows that take as long as the next one: both have as many tiles
# The most rows that are captured in pieces: the first size that computes for HIDDEN times as long
# as it takes to launch op by op. Larger steps hide their launches.
LARGEST_CAPTURED = (512, 1024, 2048)
HIDDEN = 2.0


def largest_captured(runner: Runner) -> int:
    """Rows up to which launching a step op by op would cost time. The runner has no graphs."""
    for step in (_prompt(runner, rows) for rows in LARGEST_CAPTURED):
        rows = step.num_tokens
        compute_ms, launch_ms = compute_and_launch_ms(runner, step)
        if compute_ms >= HIDDEN * launch_ms:
            break
    line = "a step of %d rows op by op: %.1f ms to compute, %.1f ms to launch"
    logger.info(line, rows, compute_ms, launch_ms)
    return rows


def measure_costs(runner: Runner) -> StepCosts:
    """Measure the costs of an engine's steps. It must not serve yet: the state rows are written.

    Where the number of levels varies, of steps that draft one.
    """
    began = time.perf_counter()
    tokens = [n for n in runner.graphs.target.prefill.sizes.tokens if n >= LEAST_PROMPT_ROWS]
    classes = _of_own(of_classes(tokens)) or [LEAST_PROMPT_ROWS]
    with compiling_is_expected():
        # from PARALLEL_ROWS on each row costs
        sizes = {*apart(classes, 4), *({PARALLEL_ROWS} & {*classes})}
        largest = row_class(_rows_of_rounds(runner)[-1])  # no round tells what larger ones cost
        sizes |= {n for n in classes if largest <= n < PARALLEL_ROWS}
        prompts = [Timed(runner, _prompt(runner, n)) for n in sorted(sizes)]
        pair = _pair(runner, prompts)
        rounds = [Timed(runner, step) for step in _rounds(runner)]
        keys = _keys(runner)
    by_rows = tuple((timed.step.num_verify_rows, timed.one_level_ms) for timed in rounds)
    by_rows = between(by_rows, range(rows_adding_experts(runner.target.model.experts)))
    with_prompts = tuple({timed.step.num_tokens: timed.ms for timed in prompts}.items())
    with_prompts = between(with_prompts, classes, as_rounds(by_rows))
    padded = [n for n in tokens if n > PARALLEL_ROWS]  # there each row costs, padding too
    costs = StepCosts(
        rounds=by_rows,
        mixed=between(with_prompts, padded),
        level=_level(rounds),
        ms_per_key=0.0 if keys is None else _per_unit(*keys),
        ms_per_pair=_per_unit(*pair),
    )
    for counters in runner.graphs.counters().values():
        counters.forget_batches()
    seconds = time.perf_counter() - began
    if runner.graphs.target.prefill.counters.captures:
        largest = runner.graphs.target.prefill.sizes.tokens[-1]
        logger.info("steps with prompts run in graphs up to %d rows", largest)
    logger.info("rounds, ms by rows: %s", _listed(costs.rounds))
    logger.info("steps with prompts: %s (measured in %.2f s)", _listed(costs.mixed), seconds)
    return costs


def measure_round_costs(runner: Runner, steps: StepCosts | None) -> StepCosts:
    """Add what it costs to draft more or fewer levels. steps: as measured above."""
    assert steps is not None, "costs are measured on a GPU"
    began = time.perf_counter()
    assert runner.graphs.target.plain is not None, "no rounds without drafts"
    counts = of_classes(runner.graphs.target.plain.sizes.requests)
    measured = _with(apart(counts, 4), doubling(runner))
    counts = _with(counts, range(rows_adding_experts(runner.target.model.experts)))
    with compiling_is_expected():
        plain = [(n, Timed(runner, _round(runner, [-1] * n, 0))) for n in measured]
        skipped = _skipped(runner)
        trees = _trees(runner)
        blocks = _blocks(runner)
        stopped = []
        if runner.threshold is not None:
            with runner.stopping_below(AT_ONCE):
                stopped = _trees(runner)
    costs = replace(
        steps,
        plain=between(_read(plain), counts, as_rounds(steps.rounds)),
        blocks=_block_costs(runner, blocks),
        skipped_ms=None if skipped is None else skipped.level_ms,
        tree=_tree_costs(runner, as_rounds(steps.rounds), _read(trees), _read(stopped)),
    )
    seconds = time.perf_counter() - began
    lists = _listed(costs.plain), _listed(costs.level)
    logger.info("plain rounds: %s; a level of drafts: %s (in %.2f s)", *lists, seconds)
    for tokens, measured_ms in costs.blocks:
        logger.info("blocks of %d tokens, by requests: %s", tokens, _listed(measured_ms))
    if costs.skipped_ms is not None:
        logger.info("a level after all drafts have stopped: %.3f ms", costs.skipped_ms)
    if costs.tree is not None:
        lists = _listed(costs.tree.all_levels), _listed(costs.tree.one_level)
        logger.info("rounds of trees, by requests: %s; drafts stopped at once: %s", *lists)
    return costs


def _rounds(runner: Runner) -> Iterator[Step]:
    """Time rounds of padding, by rows.

    Where rows are shared out, the first one of each number of requests has further levels; blocks
    are timed apart.
    """
    sizes = runner.sizes
    if sizes.is_adaptive:  # the most requests for each number of rows
        most = {rows: num_requests for num_requests, rows in runner.graphs.shapes}
        with_levels = set()
        for rows in _rows_of_rounds(runner):
            count = min(next(count for n, count in most.items() if n >= rows), rows)
            levels = 1 if count in with_levels else min(SOME_LEVELS, sizes.num_speculative_tokens)
            if sizes.block_rows:
                levels = 0
            with_levels.add(count)
            yield _round(runner, [-1] * count, levels, rows)
        return
    for rows in _rows_of_rounds(runner):
        yield _round(runner, [-1] * (rows // sizes.query_len))


def _rows_of_rounds(runner: Runner) -> list[int]:
    """List the most captured rows of each class, where they take a time of their own.

    With experts also fewer: captured or not, rows of padding read no expert.
    """
    Q = runner.sizes.query_len
    uniform = [n * Q for n in runner.graphs.target.decode.sizes.requests]
    shared = sorted({rows for _, rows in runner.graphs.shapes})
    is_adaptive = runner.sizes.is_adaptive
    rows = _of_own(of_classes(shared if is_adaptive else uniform))
    return _with(rows, doubling(runner, 1 if is_adaptive else Q))


def _with(sizes: Sequence[int], others: Sequence[int]) -> list[int]:
    """Add what is less than the last of ascending sizes."""
    return sorted({*sizes, *(n for n in others if 0 < n < sizes[-1])})


def _of_own(rows: Sequence[int]) -> list[int]:
    """Keep rows that take a time of their own, and the last, which has no next one."""
    return [n for n in rows if row_class(n) not in AS_NEXT or n == rows[-1]]


def _level(rounds: Sequence[Timed]) -> Measured:
    """Price a level by requests, from the first round with each number of them."""
    found: dict[int, float] = {}
    for timed in rounds:
        if timed.varies and timed.step.next_shape.nodes:
            found.setdefault(timed.step.num_reqs, timed.level_ms)
    return tuple(sorted(found.items()))


def _round(
    runner: Runner, state_rows: Sequence[int], num_levels: int | None = None, shared_rows: int = 0
) -> Step:
    """shared_rows: 0: all rows of the requests, or one for each where nothing is drafted."""
    sizes = runner.sizes
    usual = sizes.shape_of(len(state_rows))
    round = Round(
        state_rows=state_rows,
        shape=PLAIN if num_levels == 0 and not shared_rows else usual,
        shared_rows=shared_rows,
        next_shape=usual if num_levels is None else chain(num_levels),
    )
    return runner.step_of(round, sizes.max_model_len)


def _prompt(runner: Runner, rows: int) -> Step:
    """Make prompts of padding, as far as the sizes allow; several where one is too long."""
    sizes = runner.sizes
    lengths = lengths_of(sizes, min(rows, sizes.max_num_rows))
    least = chain(1) if sizes.has_seeds else PLAIN  # beside which more is priced apart
    return prompts(runner, lengths, next_shape=least if sizes.is_adaptive else None)


def _keys(runner: Runner) -> tuple[Timed, Timed, int] | None:
    """Time rounds of some requests at the beginning of their contexts, and after long ones.

    None: no context is long.
    """
    sizes = runner.sizes
    most = min(LONG_CONTEXT, sizes.max_model_len - 2 * sizes.query_len) // BLOCK_SIZE
    count = min(8, sizes.max_num_seqs, sizes.num_kv_blocks // max(most, 1))
    if count == 0 or most == 0:
        return None
    rows = range(count)
    K = sizes.num_speculative_tokens
    blocks = [range(row * most, (row + 1) * most) for row in rows]
    starts = [RowStart(blocks=each, num_draft_tokens=K) for each in blocks]
    runner.start_rows(list(enumerate(starts)))
    step = _round(runner, rows, 0 if sizes.is_adaptive else None)
    end = max(most * BLOCK_SIZE - 1 - 2 * sizes.query_len, 0)
    begin = min(context(sizes), end // 2) if runner.target.model.experts is not None else 0
    runner.place({"num_computed_tokens": np.full(count, begin)})
    first = Timed(runner, step)
    runner.place({"num_computed_tokens": np.full(count, end)})
    later = Timed(runner, step)
    return first, later, count * (most * BLOCK_SIZE - begin)


def _pair(runner: Runner, prompts: Sequence[Timed]) -> tuple[Timed, Timed, int]:
    """Time a part of a prompt at the beginning, and after other parts.

    The keys before it are those of one block again and again, so that reading them does not count.
    prompts: the first may be such a part already
    """
    sizes = runner.sizes
    rows = min(4 * LEAST_PROMPT_ROWS, sizes.max_model_len // 2, sizes.max_num_rows)
    start = min(LONG_CONTEXT, sizes.max_model_len - rows)
    known = (timed for timed in prompts if timed.step.num_tokens == rows)
    first = next(known, None) or Timed(runner, _prompt(runner, rows))
    [part] = first.step.parts
    moved = replace(part, prompt=[0] * (start + rows), start=start)
    step = runner.step_of(Round(next_shape=first.step.next_shape, parts=[moved]), 0)
    later = Timed(runner, step)
    for timed in (first, later):
        timed.run()
    return first, later, rows * start


def _per_unit(first: Timed, later: Timed, num_units: int) -> float:
    """Price a unit by two steps that differ by this many, in milliseconds."""
    return max(later.ms - first.ms, 0.0) / num_units


def _skipped(runner: Runner) -> Timed | None:
    """Time a round whose drafts stop at once while all levels are launched.

    None: drafts never stop.
    """
    if runner.confidence_threshold is not None:
        return None
    rows = min(rows for _, rows in runner.graphs.shapes)
    with runner.stopping_below(AT_ONCE):
        return Timed(runner, _round(runner, [-1], runner.sizes.num_speculative_tokens, rows))


def _blocks(runner: Runner) -> list[tuple[int, list[tuple[int, Timed]]]]:
    """Time blocks of each number of tokens, by requests."""
    counts = apart(sorted({n for n, _ in runner.graphs.shapes}), 2)
    lengths = runner.sizes.chain_lengths if runner.sizes.block_rows else ()
    return [
        (length, [(n, Timed(runner, _round(runner, [-1] * n, length, n))) for n in counts])
        for length in lengths
    ]


def _block_costs(
    runner: Runner, blocks: Sequence[tuple[int, Sequence[tuple[int, Timed]]]]
) -> tuple[tuple[int, Measured], ...]:
    """Price blocks by the requests of their graphs."""
    assert runner.graphs.draft is not None, "nothing drafts"
    sizes = [each.num_reqs or 0 for _, each in runner.graphs.draft.decode.descriptors()]
    return tuple(
        (length, between(tuple((n, timed.levels_ms) for n, timed in of_length), sizes))
        for length, of_length in blocks
    )


def _trees(runner: Runner) -> list[tuple[int, Timed]]:
    """Time rounds of trees with the fewest and the most requests.

    If drafts never stop, nothing tells what a level costs, so the most requests of each shape are
    timed, too.
    """
    sizes, tree = runner.graphs.tree_sizes, runner.sizes.tree
    ends = {sizes[0], sizes[-1]} if sizes else set()
    if runner.threshold is None and tree is not None:
        ends |= {n for n, more in itertools.pairwise(sizes) if tree.of(n) != tree.of(more)}
    return [(n, Timed(runner, tree_round(runner, n))) for n in sorted(ends)]


def _tree_costs(
    runner: Runner, rounds: Callable[[int], float], measured: Measured, stopped: Measured
) -> TreeCosts | None:
    """Price rounds of trees, where others are of chains. rounds: milliseconds of those, by rows."""
    shape = runner.sizes.tree
    if shape is None:
        return None
    sizes = runner.graphs.tree_sizes

    def of_rows(n: int) -> float:
        return rounds(n * shape.of(n).num_rows)

    if not stopped:
        return TreeCosts(all_levels=between(measured, sizes, of_rows), shape=shape)
    one_level = between(stopped, sizes, of_rows)
    further = {n: max(shape.of(n).num_levels - 1, 1) for n in sizes}
    at_once = dict(stopped)
    level = dict(between(tuple((n, (ms - at_once[n]) / further[n]) for n, ms in measured), sizes))
    return TreeCosts(
        all_levels=tuple((n, ms + further[n] * level[n]) for n, ms in one_level),
        one_level=one_level,
        shape=shape,
    )


def _read(timed: Sequence[tuple[int, Timed]]) -> Measured:
    return tuple((size, each.ms) for size, each in timed)


def _listed(measured: Measured) -> str:
    return ", ".join(f"{rows}: {ms:.2f}" for rows, ms in measured)
