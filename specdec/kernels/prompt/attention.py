"""One program a multiprocessor, its warps with roles, for long prompts on a Hopper GPU.

One warp fills a ring of tiles of keys and values for two groups of four warps with 64 query rows
each, tokens x heads of a kv head (warp_roles.py), so keys and values are loaded once for the group.

A row's arithmetic is that of attention/, operation by operation: tiles of 64 keys, splits at the
same borders added in the same order by the same functions. So are its bits, if the tensor cores'
sums do not depend on the instruction, which tests/specdec/kernels/test_prompt_attention.py asks.

It is made for heads of 64 and of 128 columns (`is_fit`). Prompts of all other sizes, 96 among them,
stay with attention/walk.py, which takes any.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import (
    barrier,
    gl,
    gluon_jit,
    hopper,
    next_power_of_2,
    num_multiprocessors,
    tl,
)
from specdec.kernels import warp_roles as roles
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.splits import first_seen, sink_of, split_of, split_start
from specdec.kernels.prompt.items import bounds_of, count_uneven, item_of, num_own
from specdec.kernels.repeated import Repeated
from specdec.kernels.warp_roles import ROWS

MAX_GROUP = 16  # query heads of a kv head: a query tile has 8 tokens or more


class Variant(NamedTuple):
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

    cache: [2, N + 1, G, S, C] of a layer, bfloat16 or float16
    scale: of scores
    window: of the last keys that a row sees; None: all
    """

    def __init__(
        self,
        q_THC: Tensor,
        cache: Tensor,
        rows: QueryRows,
        scale: float,
        window: int | None = None,
    ) -> None:
        _, H, C = q_THC.shape
        _, N, G, S, _ = cache.shape
        starts = rows.query_start_loc
        group = next_power_of_2(H // G)
        tokens = ROWS // group
        of_tile = len(rows.idx_mapping) * G
        num_items = -(-rows.max_query_len // tokens) * of_tile
        programs = min(num_items, num_multiprocessors(q_THC.device))
        keys_before = max(rows.max_seq_len - rows.max_query_len, 0)  # about, of the longest slot
        keys_a_step = tokens / of_tile  # from one item to the next longer one, on average
        first_rows = rows.positions if starts is None else starts
        requests = rows.block_table, rows.idx_mapping, rows.positions, first_rows
        items = num_items, count_uneven(programs, num_items, keys_before / keys_a_step)
        R, M = rows.block_table.shape
        sizes = len(rows.idx_mapping), rows.max_query_len, R - 1, M
        self._dtype = q_THC.dtype
        self._queries = (rows.num_rows, G, H // G, C), (tokens, 1, group, C)
        self._keys = (N * G * S, C), (S, C)
        self._kernel = Repeated(
            _prompt_attention_kernel,
            (programs, 1, 1),
            then=(
                *(*requests, *items, *sizes, scale * 1.4426950408889634),
                *(int(rows.is_beside), window),
            ),
            constants={"VARIANT": Variant(H, G, starts is None)},
            options={"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": False},
        )

    def __call__(
        self, out_THC: Tensor, q_THC: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None
    ) -> None:
        """Overwrite the rows of out_THC that belong to a batch slot. k, v: [N + 1, G, S, C]."""
        dtype = self._dtype
        queries = roles.descriptor(q_THC.data_ptr(), dtype, *self._queries)
        keys, values = (roles.descriptor(each.data_ptr(), dtype, *self._keys) for each in (k, v))
        self._kernel(out_THC, queries, keys, values, sinks_H)


@gluon_jit(
    varying=(
        *("idx_ptr", "positions_ptr", "starts_ptr", "num_items", "num_uneven"),
        *("num_slots", "query_len", "R", "M", "is_beside", "window", "sinks_ptr"),
    )
)
def _prompt_attention_kernel(
    out_ptr,  # [T, H, C]
    q_desc,  # [T, G, H / G, C] in blocks [TOKENS, 1, GROUP, C]
    k_desc,  # [(N + 1) x G x S, C] in blocks [S, C]
    v_desc,  # the same
    sinks_ptr,  # [H] float32, or None
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
    window,  # keys that a row sees, or None: all
    VARIANT: gl.constexpr,
):
    if is_beside == 0:
        tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    q_ring = roles.make_ring(q_desc, VARIANT.num_queries)
    k_ring = roles.make_ring(k_desc, VARIANT.num_stages)
    v_ring = roles.make_ring(v_desc, VARIANT.num_stages)
    q_bars = roles.make_barriers(VARIANT.num_queries)
    k_bars = roles.make_barriers(VARIANT.num_stages)
    v_bars = roles.make_barriers(VARIANT.num_stages)
    ones = roles.make_ones(q_desc.dtype, VARIANT.ones, k_desc.block_type.shape[0])
    hopper.fence_async_shared()
    rings = (q_ring, k_ring, v_ring, ones)
    bars = (q_bars, k_bars, v_bars, roles.make_turns())
    rows = (idx_ptr, positions_ptr, starts_ptr, (num_items, num_uneven), num_slots, query_len)
    table = (block_table_ptr, R, M)
    gl.warp_specialize(
        [
            (_attend, (out_ptr, rings, bars, rows, scale, window, sinks_ptr, VARIANT, 0)),
            (_attend, (out_ptr, rings, bars, rows, scale, window, sinks_ptr, VARIANT, 1)),
            (_copy, ((q_desc, k_desc, v_desc), rings, bars, rows, table, window, VARIANT)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
    tl.extra.cuda.gdc_wait()


@gluon_jit
def _copy(descs, rings, bars, rows, table, window, VARIANT: gl.constexpr):
    """Fill the rings, in one warp, as places become empty."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring, _ones = rings
    block_table_ptr, R, M = table
    S: gl.constexpr = k_ring.shape[1]
    TOKENS: gl.constexpr = q_ring.shape[1]
    step = 0
    num_done = 0
    for i in range(num_own(gl.program_id(0), gl.num_programs(0), rows[3][0])):
        b, g, first_row, end = item_of(i, rows, TOKENS, VARIANT)
        if first_row < end:
            slot = gl.load(rows[0] + b).to(gl.int32)
            blocks_ptr = block_table_ptr + gl.where(slot < 0, R, slot).to(gl.int64) * M
            begin = 0
            if window is None:
                block = gl.load(blocks_ptr).to(gl.int32)
                _first, last = bounds_of(rows, first_row, end, TOKENS)
            else:
                first, last = bounds_of(rows, first_row, end, TOKENS)
                begin = first_seen(first, window) // S
                block = gl.load(blocks_ptr + begin).to(gl.int32)
            num_tiles = last // S + 1
            roles.fill(q_desc, [first_row, g, 0, 0], q_ring, bars[0], num_done)
            for j in range(begin, num_tiles):
                at = (block * VARIANT.kv_heads + g) * S
                block = gl.load(blocks_ptr + gl.minimum(j + 1, num_tiles - 1)).to(gl.int32)
                roles.fill(k_desc, [at, 0], k_ring, bars[1], step)
                roles.fill(v_desc, [at, 0], v_ring, bars[2], step)
                step += 1
            num_done += 1


@gluon_jit
def _attend(
    out_ptr,
    rings,
    bars,
    rows,
    scale,
    window,
    sinks_ptr,
    VARIANT: gl.constexpr,
    HALF: gl.constexpr,
):
    """Attend, in four warps, with half the rows of each of the program's query tiles."""
    q_ring = rings[0]
    S: gl.constexpr = rings[1].shape[1]
    C: gl.constexpr = rings[1].shape[2]
    TOKENS: gl.constexpr = q_ring.shape[1]
    GROUP: gl.constexpr = q_ring.shape[3]
    step = 0
    num_done = 0
    for i in range(num_own(gl.program_id(0), gl.num_programs(0), rows[3][0])):
        _b, g, first_row, end = item_of(i, rows, TOKENS, VARIANT)
        if first_row < end:
            first, last = bounds_of(rows, first_row, end, TOKENS)
            q = roles.filled(q_ring, bars[0], num_done, True).reshape([TOKENS * GROUP, C])
            q = q.slice(HALF * (TOKENS * GROUP // 2), TOKENS * GROUP // 2)
            SCORES: gl.constexpr = roles.tile_layout(S)
            left = q.load(gl.DotOperandLayout(0, SCORES, 2))
            row = gl.arange(0, q.shape[0], gl.SliceLayout(1, SCORES)) + HALF * q.shape[0]
            t = first_row + row // GROUP
            position = gl.load(rows[1] + t, mask=t < end, other=-1).to(gl.int32)
            whole = roles.no_keys_beside(q.shape[0], C, C)
            if sinks_ptr is not None:
                row = gl.arange(0, q.shape[0], whole[0].type.layout) + HALF * q.shape[0]
                head = g * (VARIANT.heads // VARIANT.kv_heads) + row % GROUP
                inside = row % GROUP < VARIANT.heads // VARIANT.kv_heads
                whole = sink_of(sinks_ptr, head, inside), whole[1] + 1.0, whole[2]
            seen = position, first, last, window
            out, step = _attended(left, rings, bars, seen, whole, scale, step, HALF)
            barrier()  # all warps have read q
            q.store(out.to(q.dtype))
            barrier()
            BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
            row = gl.arange(0, q.shape[0], gl.SliceLayout(1, BLOCKED)) + HALF * q.shape[0]
            t = first_row + row // GROUP
            head = g * (VARIANT.heads // VARIANT.kv_heads) + row % GROUP
            inside = (t < end) & (row % GROUP < VARIANT.heads // VARIANT.kv_heads)
            c = gl.arange(0, C, gl.SliceLayout(0, BLOCKED))
            at = (t * VARIANT.heads + head)[:, None] * C + c[None, :]
            gl.store(out_ptr + at, q.load(BLOCKED), mask=inside[:, None])
            hopper.fence_async_shared()
            roles.release(q_ring, bars[0], num_done)
            num_done += 1


@gluon_jit
def _attended(q, rings, bars, seen, whole, scale, step, HALF: gl.constexpr):
    """Compute the attention [rows, C] of query rows, float32; return the next step, too.

    seen: positions, the first and the last one, the window. whole: what results are added to.
    """
    position, first, last, window = seen
    k_ring, v_ring = rings[1], rings[2]
    S: gl.constexpr = k_ring.shape[1]
    C: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = q.shape[0]
    num_tiles = last // S + 1
    # from tile `inner` up to `edge` all rows see all keys
    edge = gl.minimum((first + 1) // S, num_tiles)
    begin, inner = 0, 1
    if window is not None:
        begin = first_seen(first, window) // S
        inner = gl.minimum(gl.maximum((last - window) // S + 1, begin + 1), num_tiles)
    peak, total, acc = whole
    part_peak, part_total, part_acc = roles.no_keys_beside(ROWS, S, C)
    scores = roles.first_scores(q, rings, bars, step)
    weights, decay, part_peak = roles.weights_of(
        scores, position, begin * S, scale, part_peak, True, window
    )
    roles.filled(k_ring, bars[1], step + 1, num_tiles > begin + 1)
    is_later = False
    border = split_start(split_of(begin * S) + 1)
    state = (peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, border)
    given = (q, rings, bars, position, scale, window)
    if window is not None:
        for j in range(begin + 1, inner):
            state = _next_tile(given, j, num_tiles, step, state, HALF, True)
            step += 1
    for j in range(inner, edge):
        state = _next_tile(given, j, num_tiles, step, state, HALF, False)
        step += 1
    for j in range(gl.maximum(edge, inner), num_tiles):
        state = _next_tile(given, j, num_tiles, step, state, HALF, True)
        step += 1
    peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, _border = state
    v = roles.filled(v_ring, bars[2], step, True)
    if (last + 1) % S > 0:
        _clear_tail(v, (last + 1) % S)
    part_acc, part_total = roles.with_last(
        v, rings, bars, step, weights, part_acc, part_total, decay, is_later, HALF
    )
    peak, total, acc = roles.finished_split((peak, total, acc), part_peak, part_total, part_acc)
    return acc / total[:, None], step + 1


@gluon_jit
def _next_tile(given, j, num_tiles, step, state, HALF: gl.constexpr, IS_MASKED: gl.constexpr):
    """Make scores and powers of tile j while values of the tile before, at `step`, are added."""
    q, rings, bars, position, scale, window = given
    S: gl.constexpr = rings[1].shape[1]
    peak, total, acc, part_peak, part_total, part_acc, weights, decay, is_later, border = state
    scores, part_acc, summed = roles.next_scores(
        q, rings, bars, step, weights, part_acc, is_later, HALF
    )
    is_later = j * S < border
    before = gl.where(is_later, part_peak, float("-inf"))
    weights, next_decay, next_peak = roles.weights_of(
        scores, position, j * S, scale, before, IS_MASKED, window
    )
    # with the powers, so that LLVM takes them before this wait; ptxas still takes them after it
    roles.filled(rings[1], bars[1], step + 2, j + 1 < num_tiles)
    part_acc, weights, part_total = roles.added(
        rings, bars, step, part_acc, summed, weights, part_total, decay
    )
    if is_later:
        part_acc = part_acc * roles.column_beside(next_decay, part_acc)
    else:
        peak, total, acc = roles.finished_split((peak, total, acc), part_peak, part_total, part_acc)
        part_total = gl.zeros_like(part_total)
        border = split_start(split_of(j * S) + 1)
    return peak, total, acc, next_peak, part_total, part_acc, weights, next_decay, is_later, border


@gluon_jit
def _clear_tail(v, num_keys):
    """Clear the values of keys that are not there, whatever the cache holds.

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
