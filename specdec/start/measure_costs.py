"""What steps cost on this GPU, by a few runs of each at the start."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from specdec.kernels.compilations import compiling_is_expected
from specdec.kernels.tile_shapes import PARALLEL_ROWS, row_class
from specdec.requests.row_start import RowStart
from specdec.requests.sampling_flags import GREEDY
from specdec.runner import Runner
from specdec.scheduling.step_costs import (
    LEAST_PROMPT_ROWS,
    Measured,
    RoundCosts,
    StepCosts,
    TreeCosts,
)
from specdec.sizes import BLOCK_SIZE
from specdec.start.compile_ahead import padding_parts, prompts, tree_round
from specdec.stepping.step_sizes import Step

logger = logging.getLogger("specdec")

REPEATS = 3  # of each size; the one between the fastest and the slowest counts
NUM_LEVELS = 4  # numbers of requests for which a level of the draft is timed
SOME_LEVELS = 3
NEVER, AT_ONCE = -1.0, 2.0  # thresholds at which no draft stops, and all do after one level
LONG_CONTEXT = 4096
# What is captured in pieces at most, in rows: the first one that computes for HIDDEN times as long
# as it takes to launch op by op. Larger steps hide their launches.
LARGEST_CAPTURED = (512, 1024, 2048)
HIDDEN = 2.0


def largest_captured(runner: Runner) -> int:
    """Rows up to which launching a step op by op would cost time. The runner has no graphs."""
    for step in (_prompt(runner, rows) for rows in LARGEST_CAPTURED):
        rows = step.num_tokens
        compute_ms, launch_ms = _timed(runner, step)
        if compute_ms >= HIDDEN * launch_ms:
            break
    line = "a step of %d rows op by op: %.1f ms to compute, %.1f ms to launch"
    logger.info(line, rows, compute_ms, launch_ms)
    return rows


def measure_costs(runner: Runner) -> StepCosts:
    """The costs of an engine's steps. Nothing is being served yet: the state rows are written.

    Where the number of levels varies, of steps that draft one.
    """
    began = time.perf_counter()
    tokens = [n for n in runner.graphs.target.prefill.sizes.tokens if n >= LEAST_PROMPT_ROWS]
    with compiling_is_expected():
        rounds = {step.num_verify_rows: _ms(runner, step) for step in _rounds(runner)}
        counts = _of_classes(tokens) or [LEAST_PROMPT_ROWS]
        prompts = {step.num_tokens: step for step in (_prompt(runner, n) for n in counts)}
        mixed = {rows: _ms(runner, step) for rows, step in prompts.items()}
        costs = StepCosts(
            rounds=tuple(rounds.items()),
            mixed=_of_sizes(tuple(mixed.items()), tokens),
            ms_per_key=_ms_per_key(runner),
            ms_per_pair=_ms_per_pair(runner),
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


def measure_round_costs(runner: Runner, steps: StepCosts | None) -> RoundCosts:
    """What it costs to draft more or fewer levels. steps: as measured above."""
    assert steps is not None, "costs are measured on a GPU"
    began = time.perf_counter()
    with compiling_is_expected():
        assert runner.graphs.target.plain is not None, "no rounds without drafts"
        counts = _of_classes(runner.graphs.target.plain.sizes.requests)
        plain = tuple((n, _ms(runner, _round(runner, [-1] * n, 0))) for n in counts)
        levels = tuple((n, _level_ms(runner, n)) for n in _spread(counts, NUM_LEVELS))
        skipped_ms = None
        if runner.confidence_threshold is None:
            with runner.stopping_below(AT_ONCE):
                skipped_ms = _level_ms(runner, 1)
        tree = _tree_costs(runner)
    costs = RoundCosts(
        verify=steps.rounds,
        mixed=steps.mixed,
        plain=plain,
        level=levels,
        ms_per_key=steps.ms_per_key,
        skipped_ms=skipped_ms,
        tree=tree,
    )
    seconds = time.perf_counter() - began
    lists = _listed(plain), _listed(levels)
    logger.info("plain rounds: %s; a level of drafts: %s (in %.2f s)", *lists, seconds)
    if skipped_ms is not None:
        logger.info("a level after all drafts have stopped: %.3f ms", skipped_ms)
    if tree is not None:
        lists = _listed(tree.all_levels), _listed(tree.one_level)
        logger.info("rounds of trees, by requests: %s; drafts stopped at once: %s", *lists)
    return costs


def _tree_costs(runner: Runner) -> TreeCosts | None:
    """Of rounds of trees, where others are of chains."""
    shape = runner.sizes.tree
    if shape is None:
        return None
    one_level: Measured = ()
    all_levels = _tree_ms(runner)
    if runner.threshold is not None:
        with runner.stopping_below(AT_ONCE):
            one_level = _tree_ms(runner)
    return TreeCosts(
        all_levels=all_levels,
        one_level=one_level,
        num_rows=shape.num_rows,
        num_levels=shape.num_levels,
    )


def _tree_ms(runner: Runner) -> Measured:
    return tuple((n, _ms(runner, tree_round(runner, n))) for n in runner.graphs.tree_sizes)


def _listed(measured: Measured) -> str:
    return ", ".join(f"{rows}: {ms:.2f}" for rows, ms in measured)


def _of_classes(counts: Sequence[int]) -> list[int]:
    """Of each class of rows, which share tiles, the largest of these counts, ascending."""
    return list({row_class(n): n for n in counts}.values())


def _of_sizes(measured: Measured, captured: Sequence[int]) -> Measured:
    """With the captured sizes of many rows: there each row costs, padding too."""
    found = dict(measured)
    for (low, low_ms), (high, high_ms) in itertools.pairwise(measured):
        for size in captured:
            if PARALLEL_ROWS <= low < size < high:
                found[size] = low_ms + (size - low) / (high - low) * (high_ms - low_ms)
    return tuple(sorted(found.items()))


def _level_ms(runner: Runner, num_reqs: int) -> float:
    rows = min(rows for requests, rows in runner.graphs.shapes if requests >= num_reqs)
    one, some = (
        _ms(runner, _round(runner, [-1] * num_reqs, levels, max(rows, num_reqs)))
        for levels in (1, SOME_LEVELS)
    )
    return max(some - one, 0.0) / (SOME_LEVELS - 1)


def _rounds(runner: Runner) -> Iterator[Step]:
    """Rounds of padding, by rows: of each class of rows the most that are captured."""
    if runner.sizes.is_adaptive:  # the most requests for each number of rows
        requests = {rows: num_requests for num_requests, rows in runner.graphs.shapes}
        for rows in _of_classes(sorted(requests)):
            yield _round(runner, [-1] * min(requests[rows], rows), 1, rows)
        return
    Q = runner.sizes.query_len
    for rows in _of_classes([n * Q for n in runner.graphs.target.decode.sizes.requests]):
        yield _round(runner, [-1] * (rows // Q))


def _round(
    runner: Runner,
    state_rows: Sequence[int],
    num_levels: int | None = None,
    shared_rows: int | None = None,
) -> Step:
    """shared_rows: None: all rows of the requests, or one for each where nothing is drafted."""
    sizes = runner.sizes
    Q = 1 if num_levels == 0 else sizes.query_len
    rows = 0 if shared_rows is None else shared_rows
    return runner.step_of(state_rows, (), sizes.max_model_len, GREEDY, Q, rows, num_levels)


def _prompt(runner: Runner, rows: int) -> Step:
    """Of padding, as far as the engine's sizes allow; several prompts where one is too long."""
    sizes = runner.sizes
    longest = sizes.max_model_len - 1
    rows = min(rows, sizes.max_num_rows, sizes.max_num_seqs * longest)
    lengths = [min(longest, rows - at) for at in range(0, rows, longest)]
    return prompts(runner, lengths, num_levels=1 if sizes.is_adaptive else None)


def _ms_per_key(runner: Runner) -> float:
    """By requests behind long contexts, against the same ones at the beginning."""
    sizes = runner.sizes
    most = min(LONG_CONTEXT, sizes.max_model_len - 2 * sizes.query_len) // BLOCK_SIZE
    count = min(8, sizes.max_num_seqs, sizes.num_kv_blocks // max(most, 1))
    if count == 0 or most == 0:
        return 0.0
    rows = range(count)
    for row in rows:
        blocks = [row * most + i for i in range(most)]
        runner.start(row, RowStart(blocks=blocks, num_draft_tokens=sizes.num_speculative_tokens))
    computed = runner.state.num_computed_tokens
    times = []
    for length in (0, most * BLOCK_SIZE - 1 - 2 * sizes.query_len):
        computed[:count] = max(length, 0)
        times.append(_ms(runner, _round(runner, rows, 0 if sizes.is_adaptive else None)))
    return max(times[1] - times[0], 0.0) / (count * most * BLOCK_SIZE)


def _ms_per_pair(runner: Runner) -> float:
    """By a part of a prompt behind others, against the same one at the beginning.

    The keys before it are those of one block again and again, so that reading them does not count.
    """
    sizes = runner.sizes
    rows = min(4 * LEAST_PROMPT_ROWS, sizes.max_model_len // 2, sizes.max_num_rows)
    start = min(LONG_CONTEXT, sizes.max_model_len - rows)
    [part] = padding_parts(runner, [rows])
    moved = replace(part, prompt=[0] * (start + rows), start=start)
    steps = [runner.step_of((), [each], 0, GREEDY, None) for each in (part, moved)]
    first, later = (_ms(runner, step) for step in steps)
    return max(later - first, 0.0) / (rows * start)


def _ms(runner: Runner, step: Step) -> float:
    """Of a few runs in a row: what one outlier said would hold for the life of the engine."""
    marks = [_mark() for _ in range(REPEATS + 1)]
    with torch.inference_mode():
        marks[0].record()
        for mark in marks[1:]:
            runner.acts.run(step)
            mark.record()
    marks[-1].synchronize()
    times = (float(one.elapsed_time(other)) for one, other in itertools.pairwise(marks))
    return sorted(times)[REPEATS // 2]


def _timed(runner: Runner, step: Step) -> tuple[float, float]:
    """Milliseconds on the device, and until all is launched, of a step right behind another."""
    marks = [_mark() for _ in range(2)]
    with torch.inference_mode():
        runner.acts.run(step)
        marks[0].record()
        began = time.perf_counter()
        runner.acts.run(step)
        launch_ms = 1e3 * (time.perf_counter() - began)
        marks[1].record()
    marks[1].synchronize()
    return marks[0].elapsed_time(marks[1]), launch_ms


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of them: the first, the last, and others between."""
    if len(sizes) <= count:
        return list(sizes)
    return [sizes[i * (len(sizes) - 1) // (count - 1)] for i in range(count)]
