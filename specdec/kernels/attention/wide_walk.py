"""The walk of shared keys for many paths on a Hopper GPU: programs whose warps have roles.

Up to 128 query rows, nodes x heads of a kv head, read each key once (warp_roles.py), where walk.py
has tiles of 64 rows. Programs share the splits before the one in which paths begin, all of whose
keys all rows see, and leave a partial result of each. These take more memory traffic, to write here
and to read in combine.py, than keys and values do, so for each tile and kv head the last program
adds up what the first splits bring and leaves one result for them (wide_splits.py). A program takes
a whole multiprocessor; some are left for the programs of path_tails.py, launched after it, which
attend to the rows' last keys beside it. Where these take long, some programs of the walk have no
splits and end early, which leaves more.

Of a program, two groups of four warps have half of the query rows each. A group leaves the partial
result of each split through shared memory and the copy engine, which goes on beside the next tiles.

The arithmetic is that of walk.py, and so are the bits, but for the sign of a zero: see
prompt/attention.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import barrier, gl, gluon_jit, hopper, next_power_of_2, tl
from specdec.kernels import warp_roles as roles
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.splits import split_start
from specdec.kernels.attention.wide_splits import (
    first_split,
    list_at,
    merges,
    num_sharing,
    splits_of,
    tiles_of,
    tiles_of_slot,
    walk_programs,
)
from specdec.kernels.repeated import Repeated
from specdec.kernels.warp_roles import ROWS


class WideVariant(NamedTuple):
    """What a compiled kernel is for."""

    heads: int  # H
    kv_heads: int  # G
    num_stages: int = 4  # tiles of keys, and of values, in shared memory
    ones: int = 8  # columns of the product that adds up powers


class WideWalk:
    """The kernel of each layer of a pass. What its layers share is prepared once.

    cache: [2, N + 1, G, S, C] of a layer, bfloat16 or float16
    """

    def __init__(self, given: Pass, q_THC: Tensor, cache: Tensor) -> None:
        _, N, G, S, C = cache.shape
        rows, parts, group = given.rows, given.parts, given.heads.group
        assert rows.paths is not None, "rows without paths"
        assert given.is_uniform, "slots of different lengths"
        tokens = ROWS // next_power_of_2(group)
        _, _, blocks, idx, _, _ = given.requests()
        query_len, R, M, _, scale = given.numbers()
        B, NS, sharers = len(rows.idx_mapping), parts.num_splits, walk_programs(given)
        lists = splits_of(given, sharers)
        self._dtype = q_THC.dtype
        self._queries = (rows.num_rows, G, group, C), (tokens, 1, ROWS // tokens, C)
        self._keys = (N * G * S, C), (S, C)
        # of slots and kv heads: what a tile has after a slot's rows or a group's heads is cut off
        results = (B, query_len, G, group, NS * C), (1, tokens // 2, 1, ROWS // tokens, C)
        acc = roles.descriptor(parts.acc.data_ptr(), torch.float32, *results)
        tensors = parts.stats, blocks, idx, rows.paths.starts, lists
        sizes = sharers.fewer, lists.shape[1], lists.shape[3], query_len, R, M, NS
        self._kernel = Repeated(
            _wide_walk_kernel,
            (sharers.most, tiles_of_slot(given) * G, B),
            then=(acc, *tensors, *sizes, scale),
            constants={"VARIANT": WideVariant(group * G, G)},
            options={"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": False},
        )

    def __call__(self, q_THC: Tensor, k: Tensor, v: Tensor) -> None:
        """Leave the partial results of a layer's rows. k, v: [N + 1, G, S, C]."""
        queries = roles.descriptor(q_THC.data_ptr(), self._dtype, *self._queries)
        keys, values = (
            roles.descriptor(each.data_ptr(), self._dtype, *self._keys) for each in (k, v)
        )
        self._kernel(queries, keys, values)


@gluon_jit(
    varying=(
        *("idx_ptr", "path_starts_ptr", "lists_ptr", "fewer", "counts", "width"),
        *("query_len", "R", "M", "NS"),
    )
)
def _wide_walk_kernel(
    q_desc,  # [T, G, H / G, C] in blocks [TOKENS, 1, GROUP, C]
    k_desc,  # [(N + 1) x G x S, C] in blocks [S, C]
    v_desc,  # the same
    acc_desc,  # [B, query_len, G, H / G, NS x C] float32 in blocks [1, TOKENS / 2, 1, GROUP, C]
    stats_ptr,  # [T, H, NS, 2] float32: peak, total
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    path_starts_ptr,  # [B]
    lists_ptr,  # [1 or 2, counts, sharers, width]; see wide_splits.py
    fewer,
    counts,
    width,
    query_len,
    R,
    M,
    NS,
    scale,
    VARIANT: gl.constexpr,
):
    lists = (lists_ptr, fewer, counts, width)
    requests = (block_table_ptr, idx_ptr, R, M)
    own = own_work(path_starts_ptr, lists, requests, q_desc.block_type.shape[0], VARIANT)
    _b, _first_row, _g, splits = own
    num_tiles, _is_merged, _listed, _blocks = splits
    q_ring = roles.make_ring(q_desc, 1)
    k_ring = roles.make_ring(k_desc, VARIANT.num_stages)
    v_ring = roles.make_ring(v_desc, VARIANT.num_stages)
    q_bars = roles.make_barriers(1)
    k_bars = roles.make_barriers(VARIANT.num_stages)
    v_bars = roles.make_barriers(VARIANT.num_stages)
    ones = roles.make_ones(q_desc.dtype, VARIANT.ones, k_desc.block_type.shape[0])
    hopper.fence_async_shared()
    if num_tiles == 0:  # looked up while the barriers were made
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        return
    rings = (q_ring, k_ring, v_ring, ones)
    turns = roles.make_turns()
    for half in gl.static_range(2):
        hopper.mbarrier.arrive(turns.index(half))  # as `_await_turn` wants it: steps begin at -1
    bars = (q_bars, k_bars, v_bars, turns)
    parts = (acc_desc, stats_ptr, NS, roles.make_ring(acc_desc, 2))
    gl.warp_specialize(
        [
            (_attend, (own, rings, bars, query_len, parts, scale, VARIANT, 0)),
            (_attend, (own, rings, bars, query_len, parts, scale, VARIANT, 1)),
            (_copy_keys, (own, (k_desc, v_desc), rings, bars, VARIANT)),
            (_copy_queries, (own, q_desc, q_ring, q_bars, query_len)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[240, 24, 24],
    )


@gluon_jit
def _copy_keys(own, descs, rings, bars, VARIANT: gl.constexpr):
    """Fill the rings of keys and values, in one warp, as places become empty.

    Without a wait: what lies below the paths was there before.
    """
    k_desc, v_desc = descs
    _q_ring, k_ring, v_ring, _ones = rings
    S: gl.constexpr = k_ring.shape[1]
    _b, _first_row, g, splits = own
    num_tiles, _is_merged, listed, blocks = splits
    own_ptr, split, following = listed
    blocks_ptr, block = blocks
    tile = split_start(split) // S
    end = split_start(split + 1) // S
    for step in range(num_tiles):
        at = (block * VARIANT.kv_heads + g) * S
        tile += 1
        if tile == end:
            own_ptr += 1
            split, following = following, split_at(own_ptr + 1)
            tile = split_start(split) // S
            end = split_start(split + 1) // S
        block = gl.load(blocks_ptr + tile, cache_modifier=".cg").to(gl.int32)
        roles.fill(k_desc, [at, 0], k_ring, bars[1], step)
        roles.fill(v_desc, [at, 0], v_ring, bars[2], step)


@gluon_jit
def _copy_queries(own, q_desc, q_ring, q_bars, query_len):
    """Wait for the nodes' queries, which are new, in another warp."""
    b, first_row, g, _splits = own
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    roles.fill(q_desc, [b * query_len + first_row, g, 0, 0], q_ring, q_bars, 0)


@gluon_jit
def own_work(path_starts_ptr, lists, requests, TOKENS: gl.constexpr, VARIANT: gl.constexpr):
    """Find a program's batch slot, first row of the slot's, kv head; its splits.

    Of these: how many tiles they have, whether they are left as one, where they are listed and the
    first two of them, the request's blocks and that of the first tile. The first keys wait for all
    of this, which takes two lookups, one after the other.
    """
    lists_ptr, fewer, counts, width = lists
    block_table_ptr, idx_ptr, R, M = requests
    turn, sharers, b = gl.program_id(0), gl.num_programs(0), gl.program_id(2)
    tile, g = gl.program_id(1) // VARIANT.kv_heads, gl.program_id(1) % VARIANT.kv_heads
    begin = gl.load(path_starts_ptr + b, cache_modifier=".cg").to(gl.int32)
    slot = gl.load(idx_ptr + b, cache_modifier=".cg").to(gl.int32)
    sharing = num_sharing(begin, sharers, fewer)
    own_ptr = lists_ptr + list_at(begin, turn, sharing, sharers, counts, width)
    blocks_ptr = block_table_ptr + gl.where(slot < 0, R, slot).to(gl.int64) * M
    split = first_split(begin, turn, sharing)
    block = gl.load(blocks_ptr + split_start(split) // 64, cache_modifier=".cg").to(gl.int32)
    num_tiles = gl.load(own_ptr, cache_modifier=".cg").to(gl.int32)
    listed = own_ptr + 1, split, split_at(own_ptr + 2)
    is_merged = merges(turn, sharing).to(gl.int32)
    return b, tile * TOKENS, g, (num_tiles, is_merged, listed, (blocks_ptr, block))


@gluon_jit
def split_at(own_ptr):
    """Look up the split that is listed there."""
    return gl.load(own_ptr, cache_modifier=".cg").to(gl.int32)


@gluon_jit
def _attend(own, rings, bars, query_len, parts, scale, VARIANT: gl.constexpr, HALF: gl.constexpr):
    """Attend, in four warps, with half the query rows, to each of the program's splits.

    Scores and powers of each tile while the values of the tile before it are added.
    """
    q_ring, k_ring, _v_ring, _ones = rings
    S: gl.constexpr = k_ring.shape[1]
    C: gl.constexpr = k_ring.shape[2]
    TOKENS: gl.constexpr = q_ring.shape[1]
    GROUP: gl.constexpr = q_ring.shape[3]
    b, first_row, g, splits = own
    num_tiles, is_merged, listed, _blocks = splits
    own_ptr, split, following = listed
    place = b, first_row + HALF * (TOKENS // 2), g, query_len
    after = tiles_of(split)  # of the split, after the tile whose values are added
    q = roles.filled(q_ring, bars[0], 0, True).reshape([TOKENS * GROUP, C])
    q = q.slice(HALF * (TOKENS * GROUP // 2), TOKENS * GROUP // 2)
    q = q.load(gl.DotOperandLayout(0, roles.tile_layout(S), 2))
    whole_peak, whole_total, whole_acc = roles.no_keys_beside(q.shape[0], C, C)
    peak, total, acc = roles.no_keys_beside(q.shape[0], S, C)
    decay = gl.zeros_like(total)
    weights = gl.zeros([q.shape[0], S], gl.float32, roles.tile_layout(S))
    is_later = False
    roles.filled(k_ring, bars[1], 0, True)
    # All in one loop, since other code for the first and the last tile would take longer to fetch
    # than to run. Before the first tile there is one whose weights are 0; `is_later` drops what it
    # adds, even NaN: its place in the ring may hold anything. So may that of the tile after the
    # last one, and nothing reads its scores.
    for step in range(-1, num_tiles):
        is_there = step >= 0
        is_later = is_later & (step > 0)
        scores, acc, summed = roles.next_scores(
            q, rings, bars, step, weights, acc, is_later, HALF, is_there
        )
        is_later = after > 0
        before = gl.where(is_later, peak, float("-inf"))
        weights, next_decay, next_peak = roles.weights_of(scores, None, 0, scale, before, False)
        roles.filled(k_ring, bars[1], step + 2, step + 2 < num_tiles)
        acc, weights, total = roles.added(
            rings, bars, step, acc, summed, weights, total, decay, is_there
        )
        if is_later:
            acc = acc * roles.column_beside(next_decay, acc)
            after -= 1
        else:
            whole = whole_peak, whole_total, whole_acc
            whole_peak, whole_total, whole_acc = roles.finished_split(whole, peak, total, acc)
            if (is_merged == 0) | (step == num_tiles - 1):
                whole = whole_peak, whole_total, whole_acc
                _store(parts, split, place, whole, GROUP, VARIANT, HALF)
                whole_peak, whole_total, whole_acc = roles.no_keys_beside(q.shape[0], C, C)
            total = gl.zeros_like(total)
            own_ptr += 1
            split, following = following, split_at(own_ptr + 1)
            after = tiles_of(split) - 1
        peak, decay = next_peak, next_decay
    hopper.tma.store_wait(0)


@gluon_jit
def _store(
    parts, split, place, part, GROUP: gl.constexpr, VARIANT: gl.constexpr, HALF: gl.constexpr
):
    """Leave the partial result of each row, as `store_part` in parts.py."""
    acc_desc, stats_ptr, NS, results = parts
    b, first_row, g, query_len = place
    peak, total, acc = part
    C: gl.constexpr = acc.shape[1]
    result = results.index(HALF)
    hopper.tma.store_wait(0)  # for the one before
    barrier()
    result.reshape([acc.shape[0], C]).store(acc)
    hopper.fence_async_shared()
    barrier()
    hopper.tma.async_copy_shared_to_global(acc_desc, [b, first_row, g, 0, split * C], result)
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    t = first_row + row // GROUP
    inside = (t < query_len) & (row % GROUP < VARIANT.heads // VARIANT.kv_heads)
    head = g * (VARIANT.heads // VARIANT.kv_heads) + row % GROUP
    at = ((b * query_len + t) * VARIANT.heads + head).to(gl.int64) * NS + split
    gl.store(stats_ptr + at * 2, peak, mask=inside)
    gl.store(stats_ptr + at * 2 + 1, total, mask=inside)
