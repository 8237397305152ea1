"""Compile every kernel that serving can need, before it serves.

A kernel has a variant for each class of row counts (kernels/tile_shapes.py), and in it for one row,
for multiples of 16 and for other counts; for each way of cutting attention; and for each
combination of what requests ask of the sampler. The steps listed here need all of them; they are
launched without running. A kernel that is missing is compiled when a request needs it, counted and
logged (kernels/compilations.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.kernels.attention import launch_plan
from specdec.kernels.compilations import compiling_ahead
from specdec.requests.params import EVERYTHING, GREEDY, SamplingFlags
from specdec.rounds.short import SHORT
from specdec.rounds.step_sizes import RowMasks, Step
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import IDLE, PLAIN, DraftShape, EngineSizes, chain
from specdec.start.attention_cuts import attention_cuts, shared_cuts, tree_cuts
from specdec.start.row_counts import counts_by_class_of_experts, counts_by_kind, lengths_of
from specdec.step import Acts

DRAWN = SamplingFlags(noise=True, floor=True)
FLAGS = (
    SamplingFlags(bias=True),
    SamplingFlags(penalties=True),
    SamplingFlags(bias=True, penalties=True),
    SamplingFlags(bad_words=True),
    SamplingFlags(logprobs=1),
    EVERYTHING,
)
# of the longest prompt in a chunk; chunks of longer ones are cut like the last
ATTENTION_ROWS = range(1, 34)
LOGPROB_ROWS = (1, 2, 16, 17, 32, 33, 48, 65, 112)  # of prompts, up to logprobs.ROWS_AT_ONCE


def compile_ahead(
    runner: Runner, progress: bool = True, elsewhere: Callable[[], bool] | None = None
) -> None:
    """Compile on a GPU. The runner must not serve yet: its buffers hold garbage afterwards.

    elsewhere: see compiling_ahead
    """
    rehearsal = _Rehearsal(**vars(runner.acts))
    ahead = compiling_ahead(runner.device, progress, elsewhere=elsewhere)
    with torch.inference_mode(), ahead as note_ready:
        with runner.target.model.shortened():
            for step in forwards(runner):
                runner.acts.run(step)
                note_ready()
            launch_short_step(runner)
        if runner.exchange is not None:
            runner.exchange.launch_all_forms()
        for step in samplings(runner):
            rehearsal.run(step)
            note_ready()
        runner.start_rows([(0, RowStart(blocks=[0], num_draft_tokens=0))])


def launch_short_step(runner: Runner) -> None:
    """Launch a step with prompts as one graph has it: with query tiles from a list."""
    short = [each for _, each in runner.graphs.target.prefill.descriptors() if each.kind == SHORT]
    for desc in short[:1]:
        runner.target.make_prefill(desc, warmup=True)()


class _Rehearsal(Acts):
    """A step without the target's forward, whose kernels do not depend on the sampling."""

    def forward(self, step: Step) -> None:
        pass

    def choose(self, step: Step) -> None:
        """Choose as serving does, and clear what no kernel wrote: garbage would be embedded."""
        super().choose(step)
        self.buffers.target_tokens.zero_()


def forwards(runner: Runner) -> Iterator[Step]:
    """List each kind of row count, in a chunk; each way to cut attention, in chunks and rounds."""
    sizes = runner.sizes
    most = sum(lengths_of(sizes, sizes.max_num_rows))
    for rows in (*counts_by_kind(1, most), *counts_by_class_of_experts(most)):
        yield prompts(runner, lengths_of(sizes, rows))
    if sizes.num_speculative_tokens > 0:  # steps that only extend the draft's KV
        # where the number of drafts is fixed, those that a part of a long prompt fills
        longest = min(sizes.max_num_batched_tokens, most)
        for rows in counts_by_kind(1, most) if sizes.is_adaptive else (longest,):
            yield prompts(runner, lengths_of(sizes, rows), next_shape=PLAIN)
    most = sizes.max_num_batched_tokens
    for length, count, keys in attention_cuts(runner, ATTENTION_ROWS, most):
        yield chunk(runner, length, count, longest=keys)
    shapes = {shape.rows: shape for shape in uniform_shapes(sizes)}
    for each, count, keys in attention_cuts(runner, shapes, sizes.max_num_rows, sizes.tree):
        yield round_of(runner, count, shapes[each], longest=keys)
    if sizes.block_rows:
        most = sizes.max_num_seqs * sizes.block_rows
        lengths = {*sizes.block_lengths, *tree_levels(sizes)}
        blocks = {sizes.rows_of_block(length): chain(length) for length in sorted(lengths)}
        for rows, count, keys in attention_cuts(runner, blocks, most):
            shape = PLAIN if sizes.is_adaptive else sizes.shape_of(1)
            next_shape = blocks[rows] if sizes.is_adaptive else shape
            yield round_of(runner, count, shape, next_shape=next_shape, longest=keys)
    if launch_plan.PROMPT_MORE_THAN is not None:  # whatever the query heads of a kv head
        yield chunk(runner, launch_plan.PROMPT_MORE_THAN + 1, 1)
    yield from shared_rounds(runner)
    for count, rows, keys in shared_cuts(runner):
        yield shared_round(runner, count, rows, longest=keys)
    yield from tree_rounds(runner)
    for count, keys in tree_cuts(runner):
        yield tree_round(runner, count, longest=keys)


def samplings(runner: Runner) -> Iterator[Step]:
    """List greedy and drawn tokens for each class of row counts; all else that may be asked."""
    shapes = uniform_shapes(runner.sizes)
    for flags in (GREEDY, DRAWN):
        for count in request_counts(runner, 1):
            yield chunk(runner, 1, count, flags)
        for shape in shapes:
            for count in request_counts(runner, shape.rows):
                yield round_of(runner, count, shape, flags)
        yield from mixed_steps(runner, flags)
        yield from block_rounds(runner, flags)
        yield from shared_rounds(runner, flags)
        yield from tree_rounds(runner, flags)
    for flags in FLAGS:
        yield chunk(runner, 1, 1, flags)
        for shape in shapes:
            yield round_of(runner, 1, shape, flags)
        if runner.sizes.is_adaptive:
            yield shared_round(runner, 1, runner.sizes.query_len, flags)
        for count in tree_counts(runner.sizes):
            yield tree_round(runner, count, flags)
    words = -(-runner.state.sampling.vocab_size // 32)
    masks = RowMasks(np.zeros(1, np.int64), np.full((1, words), -1, np.int32))
    yield replace(chunk(runner, 1, 1, SamplingFlags(guided=True)), masks=lambda: masks)
    for rows in LOGPROB_ROWS:  # each follows a token of the prompt
        yield chunk(runner, rows + 1, 1, SamplingFlags(logprobs=1), num_logprobs=1)


def uniform_shapes(sizes: EngineSizes) -> list[DraftShape]:
    """List what each request verifies, in rounds whose rows are not shared out."""
    return [PLAIN] if sizes.is_adaptive else list(dict.fromkeys((PLAIN, sizes.shape_of(1))))


def block_rounds(runner: Runner, flags: SamplingFlags) -> Iterator[Step]:
    """List blocks of each length and kind of row count, where their length varies."""
    sizes = runner.sizes
    for length in sizes.block_lengths if sizes.is_adaptive else ():
        for count in request_counts(runner, length + 1):
            yield round_of(runner, count, PLAIN, flags, chain(length))


def shared_rounds(runner: Runner, flags: SamplingFlags = GREEDY) -> Iterator[Step]:
    """List rounds to be captured: of each number of rows, with the fewest and most requests."""
    most = runner.sizes.max_num_seqs
    shapes = runner.graphs.shapes
    fewest = {rows: count for count, rows in reversed(shapes)}  # ascending by both
    chosen = [*fewest.items(), *((rows, count) for count, rows in shapes if count == most)]
    for rows, count in chosen:  # a shape may have more slots than rows
        yield shared_round(runner, min(count, rows), rows, flags)
    if shapes:
        yield round_of(runner, 1, PLAIN, flags, PLAIN)


def tree_rounds(runner: Runner, flags: SamplingFlags = GREEDY) -> Iterator[Step]:
    """List rounds of every number of requests, where other rounds are of chains."""
    if runner.sizes.has_both:
        for count in range(1, runner.sizes.max_tree_requests + 1):
            yield tree_round(runner, count, flags)


def tree_counts(sizes: EngineSizes) -> list[int]:
    """List the fewest requests of each shape of tree, where other rounds are of chains."""
    if sizes.tree is None or not sizes.is_adaptive:
        return []
    return [n for n in sizes.tree.first_requests if n <= sizes.max_tree_requests]


def tree_levels(sizes: EngineSizes) -> list[int]:
    """List how many levels trees have, where other rounds are of chains."""
    return [sizes.shape_of(n, is_wide=True).levels for n in tree_counts(sizes)]


def tree_round(
    runner: Runner,
    num_reqs: int,
    flags: SamplingFlags = GREEDY,
    parts: Sequence[PromptPart] = (),
    longest: int | None = None,
) -> Step:
    """Draft trees after requests without state rows, where others draft chains.

    parts: of prompts beside them. longest: see round_of
    """
    shape = runner.sizes.shape_of(num_reqs, is_wide=True)
    return round_of(runner, num_reqs, shape, flags, parts=parts, longest=longest)


def mixed_steps(runner: Runner, flags: SamplingFlags) -> Iterator[Step]:
    """List steps in which rows that verify and ends of prompts make any number of decided rows."""
    sizes = runner.sizes
    if sizes.max_num_seqs == 1:  # its only request verifies or begins
        return
    if sizes.is_adaptive:  # any share of the rows and any number of prompts that end
        decided = min(sizes.max_verify_rows + sizes.max_num_seqs - 1, sizes.max_num_rows)
        for rows in counts_by_kind(1, decided):
            if rows > 1:
                parts = padding_parts(runner, [1])
                yield shared_round(runner, 1, rows - 1, flags, parts)
        for count in tree_counts(sizes):
            if count < sizes.max_num_seqs:
                yield tree_round(runner, count, flags, padding_parts(runner, [1]))
        return
    for rows in counts_by_kind(1, sizes.max_verify_rows):
        num_verified = min(rows // sizes.query_len, sizes.max_num_seqs - 1)
        num_ending = rows - num_verified * sizes.query_len
        if num_verified > 0 and 0 < num_ending <= sizes.max_num_seqs - num_verified:
            parts = padding_parts(runner, [1] * num_ending)
            shape = sizes.shape_of(num_verified)
            yield round_of(runner, num_verified, shape, flags, parts=parts)


def request_counts(runner: Runner, query_len: int) -> Iterable[int]:
    """List every kind of row count; of trees also those of the draft's levels, and of blocks.

    All requests are among them: their number is what some kernels go by.
    """
    sizes, most = runner.sizes, runner.sizes.max_num_seqs
    tree = None if sizes.is_adaptive else sizes.tree  # else rounds of trees are listed apart
    each = [query_len]
    if query_len > 1 and tree is not None:
        each.append(tree.top_k)
    if query_len > 1 and sizes.block_rows:  # the rows of a block, and those that propose
        proposing = query_len - 1 - sizes.has_seeds
        each += (proposing,) if tree is None else (tree.num_levels, tree.num_levels + 1)
    return dict.fromkeys(count for rows in each for count in (*counts_by_kind(rows, most), most))


def chunk(
    runner: Runner,
    length: int,
    count: int,
    flags: SamplingFlags = GREEDY,
    num_logprobs: int | None = None,
    longest: int | None = None,
) -> Step:
    """Make `count` prompts of `length` tokens, as far as the engine's sizes allow.

    longest: keys of each, with those that come before these; None: there are none
    """
    sizes = runner.sizes
    length = max(min(length, sizes.max_model_len - 1, sizes.max_num_batched_tokens), 1)
    count = max(min(count, sizes.max_num_seqs, sizes.max_num_batched_tokens // length), 1)
    start = 0 if longest is None else max(min(longest, sizes.max_model_len - 1) - length, 0)
    return prompts(runner, [length] * count, flags, num_logprobs, start=start)


def prompts(
    runner: Runner,
    lengths: Sequence[int],
    flags: SamplingFlags = GREEDY,
    num_logprobs: int | None = None,
    next_shape: DraftShape | None = None,
    start: int = 0,
) -> Step:
    """Make a step of prompts without state rows. next_shape: None: with further levels."""
    parts = padding_parts(runner, lengths, num_logprobs, start)
    sizes = runner.sizes
    if next_shape is None:
        next_shape = _drafts(sizes) if sizes.is_adaptive else sizes.shape_of(len(parts))
    return runner.step_of(Round(next_shape=next_shape, parts=parts), 0, flags)


def padding_parts(
    runner: Runner, lengths: Sequence[int], num_logprobs: int | None = None, start: int = 0
) -> list[PromptPart]:
    """Make ends of prompts, from `start` on, whose keys and values go to the scratch block."""
    sizes = runner.sizes
    blocks = [sizes.num_kv_blocks] * sizes.blocks_per_request
    tokens = {length: [0] * (start + length) for length in {*lengths}}  # it may be long
    return [
        PromptPart(
            state_row=-1,
            prompt=tokens[length],
            start=start,
            length=length,
            blocks=blocks,
            num_logprobs=num_logprobs,
        )
        for length in lengths
    ]


def round_of(
    runner: Runner,
    num_reqs: int,
    shape: DraftShape,
    flags: SamplingFlags = GREEDY,
    next_shape: DraftShape | None = None,
    *,
    shared_rows: int = 0,
    parts: Sequence[PromptPart] = (),
    longest: int | None = None,
) -> Step:
    """Make a round of padding, see Runner.run_step. next_shape: None: as the shape.

    longest: bounds the keys, those of the draft's levels too; None: the context does
    """
    sizes = runner.sizes
    computed = sizes.max_model_len if longest is None else max(longest - 2 * sizes.path_len, 0)
    if next_shape is None:
        next_shape = shape if shape.nodes else IDLE
    round = Round(
        state_rows=[-1] * num_reqs,
        shape=shape,
        shared_rows=shared_rows,
        next_shape=next_shape,
        parts=parts,
    )
    return runner.step_of(round, computed, flags)


def shared_round(
    runner: Runner,
    num_reqs: int,
    num_rows: int,
    flags: SamplingFlags = GREEDY,
    parts: Sequence[PromptPart] = (),
    longest: int | None = None,
) -> Step:
    """Make a round of padding whose rows are shared out; one further level is drafted."""
    shape = runner.sizes.shape_of(num_reqs)
    how = runner, num_reqs, shape, flags, _drafts(runner.sizes)
    return round_of(*how, shared_rows=num_rows, parts=parts, longest=longest)


def _drafts(sizes: EngineSizes) -> DraftShape:
    """Draft two levels, whose kernels are those of any number, or a whole block."""
    return chain(sizes.num_speculative_tokens if sizes.block_rows else 2)
