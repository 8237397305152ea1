"""Attention of prompts on a Hopper GPU: one program a multiprocessor, its warps with roles.

One warp lets the copy engine fill a ring of tiles of keys and values. Two groups of four warps have
64 query rows each, tokens x heads of a kv head, so keys and values are loaded once for the group.
Scores of a tile are multiplied while the values before it are, and one group's powers are taken
under the other's products.

A row's arithmetic is that of attention/, operation by operation: tiles of 64 keys, splits at the
same borders added in the same order by the same functions. So are its bits, if the tensor cores'
sums do not depend on the instruction, which tests/specdec/kernels/test_prompt_attention.py asks.

It is made for heads of 64 and of 128 columns (`is_fit`). Prompts of all other sizes, 96 among them,
stay with attention/walk.py, which takes any.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import (
    GluonDescriptor,
    barrier,
    constexpr_function,
    gl,
    gluon_jit,
    hopper,
    next_power_of_2,
    num_multiprocessors,
    tl,
)
from specdec.kernels.attention.splits import add_part, finite, split_of, split_start, weigh
from specdec.kernels.repeated import Repeated

ROWS = 128  # of a query tile, half for each group of warps
MAX_GROUP = 16  # query heads of a kv head: a query tile has 8 tokens or more


class Form(NamedTuple):
    """What a compiled kernel is for."""

    heads: int  # H
    kv_heads: int  # G
    is_uniform: bool
    num_stages: int = 4  # tiles of keys, and of values, in shared memory
    num_queries: int = 2  # query tiles: the next one arrives early
    ones: int = 8  # columns of the product that adds up powers


def is_fit(group: int, block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is made for these sizes. group: query heads of a kv head."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and block_size == 64 and head_dim in (64, 128) and group <= MAX_GROUP


class PromptAttention:
    """The kernel of each layer of a pass. What its layers share is prepared once.

    cache:           [2, N + 1, G, S, C] of a layer, bfloat16 or float16
    query_start_loc: [B + 1], None where all batch slots have max_query_len rows
    num_keys_before: about as many keys lie before the rows of the longest slot; for the order only
    is_beside:       launched right after the attention of other rows of the pass: see overlap.py
    """

    def __init__(
        self,
        q_THC: Tensor,
        cache: Tensor,
        block_table: Tensor,
        idx_mapping: Tensor,
        positions: Tensor,
        query_start_loc: Tensor | None,
        max_query_len: int,
        num_keys_before: int = 0,
        is_beside: bool = False,
    ) -> None:
        _, H, C = q_THC.shape
        _, N, G, S, _ = cache.shape
        group = next_power_of_2(H // G)
        tokens = ROWS // group
        of_tile = len(idx_mapping) * G
        num_items = -(-max_query_len // tokens) * of_tile
        programs = min(num_items, num_multiprocessors(q_THC.device))
        keys_a_step = tokens / of_tile  # from one item to the next longer one, on average
        R, M = block_table.shape
        self._dtype = q_THC.dtype
        self._queries = (len(positions), G, H // G, C), (tokens, 1, group, C)
        self._keys = (N * G * S, C), (S, C)
        self._kernel = Repeated(
            _prompt_attention_kernel,
            (programs, 1, 1),
            then=(
                block_table,
                idx_mapping,
                positions,
                positions if query_start_loc is None else query_start_loc,
                num_items,
                count_uneven(programs, num_items, num_keys_before / keys_a_step),
                len(idx_mapping),
                max_query_len,
                R - 1,
                M,
                C**-0.5 * 1.4426950408889634,
                int(is_beside),
            ),
            constants={"FORM": Form(H, G, query_start_loc is None)},
            options={"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": False},
        )

    def __call__(self, out_THC: Tensor, q_THC: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite the rows of out_THC that belong to a batch slot. k, v: [N + 1, G, S, C]."""
        dtype = self._dtype
        queries = _descriptor(q_THC.data_ptr(), dtype, *self._queries)
        keys, values = (_descriptor(each.data_ptr(), dtype, *self._keys) for each in (k, v))
        self._kernel(out_THC, queries, keys, values)


def count_uneven(programs: int, num_items: int, least: float) -> int:
    """Of how many pairs of rounds the programs with fewer items take the longer ones; own_item.

    least: keys of the shortest item, which some programs have and others not, in steps from one
        item to the next longer one
    """
    if num_items % programs == 0:
        return 0
    # of a pair of rounds: two items, each as many steps longer as there are programs
    gain = 2 * programs
    return min(num_items // programs // 2, round(least / gain))


class _Memory(NamedTuple):
    """Where a descriptor's numbers are. It keeps no tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


# each layer's keys and values, and what a few passes have as queries
@lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, ...]
) -> GluonDescriptor:
    """Of contiguous numbers of 16 bits, for the copy engine."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return GluonDescriptor(_Memory(address, dtype), list(shape), strides, list(block), layout)


@gluon_jit(
    varying=(
        "idx_ptr",
        "positions_ptr",
        "starts_ptr",
        "num_items",
        "num_uneven",
        "num_slots",
        "query_len",
        "R",
        "M",
        "is_beside",
    )
)
def _prompt_attention_kernel(
    out_ptr,  # [T, H, C]
    q_desc,  # [T, G, H / G, C] in blocks [TOKENS, 1, GROUP, C]
    k_desc,  # [(N + 1) x G x S, C] in blocks [S, C]
    v_desc,  # the same
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without is_uniform
    num_items,
    num_uneven,
    num_slots,
    query_len,
    R,
    M,
    scale,
    is_beside,
    FORM: gl.constexpr,
):
    _begin(is_beside)
    q_ring = _ring(q_desc, FORM.num_queries)
    k_ring = _ring(k_desc, FORM.num_stages)
    v_ring = _ring(v_desc, FORM.num_stages)
    q_bars = _barriers(FORM.num_queries)
    k_bars = _barriers(FORM.num_stages)
    v_bars = _barriers(FORM.num_stages)
    ones = _ones(q_desc.dtype, FORM.ones, k_desc.block_type.shape[0])
    hopper.fence_async_shared()
    rings = (q_ring, k_ring, v_ring, ones)
    bars = (q_bars, k_bars, v_bars, _turns())
    rows = (idx_ptr, positions_ptr, starts_ptr, (num_items, num_uneven), num_slots, query_len)
    gl.warp_specialize(
        [
            (_attend_upper, (out_ptr, rings, bars, rows, scale, FORM)),
            (_attend_lower, (out_ptr, rings, bars, rows, scale, FORM)),
            (_copy, ((q_desc, k_desc, v_desc), rings, bars, rows, (block_table_ptr, R, M), FORM)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
    tl.extra.cuda.gdc_wait()


@gluon_jit
def _begin(is_beside):
    """As `begin_beside` in overlap.py."""
    if is_beside == 0:
        tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@gluon_jit
def _ring(desc, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  # no starred lists here
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon_jit
def _barriers(COUNT: gl.constexpr):
    """Of each place of a ring: it is ready, it is empty again."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=2)
    return ready, empty


@gluon_jit
def _turns():
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        hopper.mbarrier.init(turns.index(i), count=1)
    return turns


@gluon_jit
def _ones(dtype: gl.constexpr, ONES: gl.constexpr, S: gl.constexpr):
    """A matrix [ONES, S] in shared memory."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(
        dtype, [ONES, S], SHARED, gl.full([ONES, S], 1.0, dtype, BLOCKED)
    )


@gluon_jit
def num_own(place, programs, num_items):
    """How many items a program has; place: its number."""
    rounds = num_items // programs
    return rounds + (_item_there_and_back(rounds, place, programs) < num_items)


@gluon_jit
def own_item(i, place, programs, num_items, uneven):
    """Which item is a program's i-th: every other round goes back, so that all have as much.

    Where the last ones are long, too, programs that have an item more would have too much: those
    with fewer take the longer ones of the first pairs of rounds, as many as `uneven`.
    """
    if i < 2 * uneven:
        more = num_items % programs  # programs with an item more; they come last in `rank`
        fewer = programs - more
        is_last_back = num_items // programs % 2
        rank = is_last_back * place + (1 - is_last_back) * (programs - 1 - place)
        item = _pair(i, 0, rank, fewer)
        if rank >= fewer:
            item = _pair(i, 2 * fewer, rank - fewer, more)
        item += i // 2 * 2 * programs
    else:
        item = _item_there_and_back(i, place, programs)
    return item


@gluon_jit
def _pair(i, first, rank, programs):
    """Of a pair of rounds, from item `first` on, for so many programs: there and back."""
    return first + rank + i % 2 * (2 * programs - 1 - 2 * rank)


@gluon_jit
def _item_there_and_back(i, place, programs):
    return i * programs + place + i % 2 * (programs - 1 - 2 * place)


@gluon_jit
def place_of_item(item, num_items, num_slots, G):
    """An item's query tile, batch slot and kv head. The tiles with most keys come first.

    For no item from num_items on: a division of negative numbers rounds towards 0.
    """
    of_tile = num_slots * G
    return (num_items - 1 - item) // of_tile, item % of_tile // G, item % G


@gluon_jit
def _num_own(rows):
    return num_own(gl.program_id(0), gl.num_programs(0), rows[3][0])


@gluon_jit
def _item(i, rows, TOKENS: gl.constexpr, FORM: gl.constexpr):
    """A program's i-th item: batch slot, kv head, first row, and the end of the slot's rows.

    Items of slots that are shorter than the longest may begin at or after that end.
    """
    _idx_ptr, _positions_ptr, starts_ptr, items, num_slots, query_len = rows
    num_items, uneven = items
    item = own_item(i, gl.program_id(0), gl.num_programs(0), num_items, uneven)
    tile, b, g = place_of_item(item, num_items, num_slots, FORM.kv_heads)
    if FORM.is_uniform:
        first_row = b * query_len
        end = first_row + query_len
    else:
        first_row = gl.load(starts_ptr + b).to(gl.int32)
        end = gl.load(starts_ptr + b + 1).to(gl.int32)
    return b, g, first_row + tile * TOKENS, end


@gluon_jit
def _bounds(rows, first_row, end, TOKENS: gl.constexpr):
    """The first and the last position of a query tile. Each warp finds them by itself."""
    EACH: gl.constexpr = gl.BlockedLayout(
        [TOKENS // 32 if TOKENS > 32 else 1], [32], [gl.num_warps()], [0]
    )
    t = first_row + gl.arange(0, TOKENS, EACH)
    position = gl.load(rows[1] + t, mask=t < end, other=-1).to(gl.int32)
    last = gl.max(position, axis=0)
    return gl.min(gl.where(t < end, position, last), axis=0), last


@gluon_jit
def _copy(descs, rings, bars, rows, table, FORM: gl.constexpr):
    """What one warp does: fill the rings, as places become empty."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring, _ones = rings
    block_table_ptr, R, M = table
    S: gl.constexpr = k_ring.shape[1]
    TOKENS: gl.constexpr = q_ring.shape[1]
    step = 0
    num_done = 0
    for i in range(_num_own(rows)):
        b, g, first_row, end = _item(i, rows, TOKENS, FORM)
        if first_row < end:
            slot = gl.load(rows[0] + b).to(gl.int32)
            blocks_ptr = block_table_ptr + gl.where(slot < 0, R, slot).to(gl.int64) * M
            block = gl.load(blocks_ptr).to(gl.int32)
            _first, last = _bounds(rows, first_row, end, TOKENS)
            num_tiles = last // S + 1
            _fill(q_desc, [first_row, g, 0, 0], q_ring, bars[0], num_done)
            for j in range(num_tiles):
                at = (block * FORM.kv_heads + g) * S
                block = gl.load(blocks_ptr + gl.minimum(j + 1, num_tiles - 1)).to(gl.int32)
                _fill(k_desc, [at, 0], k_ring, bars[1], step)
                _fill(v_desc, [at, 0], v_ring, bars[2], step)
                step += 1
            num_done += 1


@gluon_jit
def _place(step, COUNT: gl.constexpr):
    """In a ring of a power of 2; a remainder of signed numbers takes more instructions."""
    return step & (COUNT - 1)


@gluon_jit
def _phase(step, COUNT: gl.constexpr):
    """Whether a ring has been gone through an odd number of times."""
    SHIFT: gl.constexpr = _log2(COUNT)
    return (step >> SHIFT) & 1


@constexpr_function
def _log2(count):
    assert count & (count - 1) == 0, count
    return count.bit_length() - 1


@gluon_jit
def _fill(desc, coordinates, ring, bars, step):
    """Let the copy engine fill the next place, once it is empty."""
    ready, empty = bars
    COUNT: gl.constexpr = ring.shape[0]
    at = _place(step, COUNT)
    hopper.mbarrier.wait(empty.index(at), _phase(step, COUNT) ^ 1)
    hopper.mbarrier.expect(ready.index(at), desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(desc, coordinates, ready.index(at), ring.index(at))


@gluon_jit
def _await(ring, bars, step, is_there):
    """The next place, once it is filled."""
    COUNT: gl.constexpr = ring.shape[0]
    at = _place(step, COUNT)
    hopper.mbarrier.wait(bars[0].index(at), _phase(step, COUNT), pred=is_there)
    return ring.index(at)


@gluon_jit
def _release(ring, bars, step):
    COUNT: gl.constexpr = ring.shape[0]
    hopper.mbarrier.arrive(bars[1].index(_place(step, COUNT)))


@gluon_jit
def _await_turn(turns, step, HALF: gl.constexpr):
    """The two groups of warps begin products in turn, so that one takes powers meanwhile."""
    hopper.mbarrier.wait(turns.index(HALF), (step + 1 - HALF) & 1)


@gluon_jit
def _pass_turn(turns, HALF: gl.constexpr):
    hopper.mbarrier.arrive(turns.index(1 - HALF))


@gluon_jit
def _attend_upper(out_ptr, rings, bars, rows, scale, FORM: gl.constexpr):
    _attend(out_ptr, rings, bars, rows, scale, FORM, 0)


@gluon_jit
def _attend_lower(out_ptr, rings, bars, rows, scale, FORM: gl.constexpr):
    _attend(out_ptr, rings, bars, rows, scale, FORM, 1)


@gluon_jit
def _attend(out_ptr, rings, bars, rows, scale, FORM: gl.constexpr, HALF: gl.constexpr):
    """What four warps do: half the rows of each of the program's query tiles."""
    q_ring = rings[0]
    S: gl.constexpr = rings[1].shape[1]
    C: gl.constexpr = rings[1].shape[2]
    TOKENS: gl.constexpr = q_ring.shape[1]
    GROUP: gl.constexpr = q_ring.shape[3]
    step = 0
    num_done = 0
    for i in range(_num_own(rows)):
        _b, g, first_row, end = _item(i, rows, TOKENS, FORM)
        if first_row < end:
            first, last = _bounds(rows, first_row, end, TOKENS)
            q = _await(q_ring, bars[0], num_done, True).reshape([TOKENS * GROUP, C])
            q = q.slice(HALF * (TOKENS * GROUP // 2), TOKENS * GROUP // 2)
            SCORES: gl.constexpr = _layout(S)
            left = q.load(gl.DotOperandLayout(0, SCORES, 2))
            row = gl.arange(0, q.shape[0], gl.SliceLayout(1, SCORES)) + HALF * q.shape[0]
            t = first_row + row // GROUP
            position = gl.load(rows[1] + t, mask=t < end, other=-1).to(gl.int32)
            out, step = _attended(left, rings, bars, position, first, last, scale, step, HALF)
            barrier()  # all warps have read q
            q.store(out.to(q.dtype))
            barrier()
            BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
            row = gl.arange(0, q.shape[0], gl.SliceLayout(1, BLOCKED)) + HALF * q.shape[0]
            t = first_row + row // GROUP
            head = g * (FORM.heads // FORM.kv_heads) + row % GROUP
            inside = (t < end) & (row % GROUP < FORM.heads // FORM.kv_heads)
            c = gl.arange(0, C, gl.SliceLayout(0, BLOCKED))
            at = (t * FORM.heads + head)[:, None] * C + c[None, :]
            gl.store(out_ptr + at, q.load(BLOCKED), mask=inside[:, None])
            hopper.fence_async_shared()
            _release(q_ring, bars[0], num_done)
            num_done += 1


@gluon_jit
def _attended(q, rings, bars, position, first, last, scale, step, HALF: gl.constexpr):
    """The attention [rows, C] of query rows, float32; the next step."""
    _q_ring, k_ring, v_ring, ones = rings
    S: gl.constexpr = k_ring.shape[1]
    C: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = q.shape[0]
    num_tiles = last // S + 1
    whole = gl.minimum((first + 1) // S, num_tiles)
    peak, total, acc = _no_keys(ROWS, C, C)
    part_peak, part_total, part_acc = _no_keys(ROWS, S, C)
    _await(k_ring, bars[1], step, True)
    scores = _begin_scores(q, k_ring, step)
    scores = hopper.warpgroup_mma_wait(0, [scores])
    _release(k_ring, bars[1], step)
    weights, decay, part_peak = _weights(scores, position, 0, scale, part_peak, True)
    _await(k_ring, bars[1], step + 1, num_tiles > 1)
    is_later = False
    border = split_start(1)  # of the next split
    state = (peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, border)
    for j in range(1, whole):
        state = _next_tile(q, rings, bars, position, j, num_tiles, scale, step, state, HALF, False)
        step += 1
    for j in range(gl.maximum(whole, 1), num_tiles):
        state = _next_tile(q, rings, bars, position, j, num_tiles, scale, step, state, HALF, True)
        step += 1
    peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, _border = state
    v = _await(v_ring, bars[2], step, True)
    if (last + 1) % S > 0:
        _clear_tail(v, (last + 1) % S)
    left = _left(weights, v_ring)
    _await_turn(bars[3], step, HALF)
    part_acc, summed = _begin_values(left, v, ones, part_acc, is_later)
    _pass_turn(bars[3], HALF)
    part_acc, summed = hopper.warpgroup_mma_wait(0, [part_acc, summed])
    _release(v_ring, bars[2], step)
    part_total = _total(part_total, decay, summed)
    peak, total, acc = _finished((peak, total, acc), part_peak, part_total, part_acc)
    return acc / total[:, None], step + 1


@gluon_jit
def _next_tile(
    q,
    rings,
    bars,
    position,
    j,
    num_tiles,
    scale,
    step,
    state,
    HALF: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Scores and powers of tile j while the values of the tile before it, at `step`, are added."""
    _q_ring, k_ring, v_ring, ones = rings
    S: gl.constexpr = k_ring.shape[1]
    peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, border = state
    left = _left(weights, v_ring)
    _await_turn(bars[3], step, HALF)
    scores = _begin_scores(q, k_ring, step + 1)
    v = _await(v_ring, bars[2], step, True)
    part_acc, summed = _begin_values(left, v, ones, part_acc, is_later)
    _pass_turn(bars[3], HALF)
    scores = hopper.warpgroup_mma_wait(2, [scores])
    _release(k_ring, bars[1], step + 1)
    is_later = j * S < border
    before = gl.where(is_later, part_peak, float("-inf"))
    weights, next_decay, next_peak = _weights(scores, position, j * S, scale, before, IS_MASKED)
    # with the powers, so that LLVM takes them before this wait; ptxas still takes them after it
    _await(k_ring, bars[1], step + 2, j + 1 < num_tiles)
    part_acc, summed, weights = hopper.warpgroup_mma_wait(0, [part_acc, summed, weights])
    _release(v_ring, bars[2], step)
    part_total = _total(part_total, decay, summed)
    if is_later:
        part_acc = part_acc * _column(next_decay, part_acc)
    else:
        peak, total, acc = _finished((peak, total, acc), part_peak, part_total, part_acc)
        part_total = gl.zeros_like(part_total)
        border = split_start(split_of(j * S) + 1)
    return peak, total, acc, next_peak, part_total, part_acc, weights, next_decay, is_later, border


@constexpr_function
def _layout(COLUMNS):
    """Of a tile of 64 rows in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon_jit
def _no_keys(ROWS: gl.constexpr, BESIDE: gl.constexpr, C: gl.constexpr):
    """The partial result of rows that have seen no key; peaks lie as beside a tile BESIDE wide."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _layout(BESIDE))
    peak = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    total = gl.zeros([ROWS], gl.float32, LAYOUT)
    return peak, total, _zeros(ROWS, C)


@gluon_jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    LAYOUT: gl.constexpr = _layout(COLUMNS)
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon_jit
def _begin_scores(q, k_ring, step):
    COUNT: gl.constexpr = k_ring.shape[0]
    k = k_ring.index(_place(step, COUNT))
    zeros = _zeros(q.shape[0], k.shape[0])
    return hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _begin_values(weights, v, ones, acc, is_later):
    """Begin to add the weighted values, and to sum up the weights."""
    zeros = _zeros(acc.shape[0], ones.shape[0])
    acc = hopper.warpgroup_mma(weights, v, acc, use_acc=is_later, is_async=True)
    summed = hopper.warpgroup_mma(
        weights, ones.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    return acc, summed


@gluon_jit
def _weights(scores, position, start, scale, peak, IS_MASKED: gl.constexpr):
    """A tile's powers of 2, what the sums so far decay by, and the peak."""
    if IS_MASKED:
        s = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(s[None, :] <= position[:, None], scores, float("-inf"))
    highest = gl.convert_layout(_highest(scores), peak.type.layout)
    decay, _, peak = weigh(peak, highest * scale)
    return gl.exp2(gl.fma(scores, scale, -finite(peak)[:, None])), decay, peak


@gluon_jit
def _highest(scores):
    """The maximum of each row: of two halves, and so on, lest each number waits for the last."""
    halved = scores
    for _i in gl.static_range(3):
        halves = halved.reshape([halved.shape[0], 2, halved.shape[1] // 2]).permute((0, 2, 1))
        left, right = gl.split(halves)
        halved = gl.maximum(left, right)
    return gl.max(halved, axis=1)


@gluon_jit
def _left(weights, v):
    """Rounded, as the left side of a product."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _layout(v.shape[2]), 2)
    return gl.convert_layout(weights, LEFT).to(v.dtype)


@gluon_jit
def _total(total, decay, summed):
    summed = gl.convert_layout(gl.max(summed, axis=1), total.type.layout)
    return gl.fma(total, decay, summed)


@gluon_jit
def _finished(whole, peak, total, acc):
    """The partial result of earlier splits, and that of the split that ends here."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    peak = gl.convert_layout(peak, ROWS)
    return add_part(whole[0], whole[1], whole[2], peak, gl.convert_layout(total, ROWS), acc)


@gluon_jit
def _column(x, tile):
    """x [rows] beside a tile of another layout."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon_jit
def _clear_tail(v, num_keys):
    """Values of keys that are not there become 0, whatever the cache holds.

    Both groups of warps write the same to the same place, and multiply only after that.
    """
    C: gl.constexpr = v.shape[1]
    AT_ONCE: gl.constexpr = 16
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    for i in gl.static_range(v.shape[0] // AT_ONCE):
        rows = v.slice(i * AT_ONCE, AT_ONCE)
        s = i * AT_ONCE + gl.arange(0, AT_ONCE, gl.SliceLayout(1, BLOCKED))
        values = rows.load(BLOCKED)
        rows.store(gl.where((s < num_keys)[:, None], values, gl.zeros_like(values)))
    hopper.fence_async_shared()
    barrier()
