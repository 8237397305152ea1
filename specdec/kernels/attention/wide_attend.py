"""What the multiplying warps of wide_walk.py do with the splits of their program.

Two groups of four warps have half of the query rows each. A group leaves the partial result of
each split through shared memory and the copy engine, which goes on beside the next tiles.
"""

from specdec.kernels import barrier, gl, gluon_jit, hopper
from specdec.kernels.attention.splits import split_start
from specdec.kernels.attention.wide_splits import (
    first_split,
    merges,
    num_sharing,
    share_at,
    tiles_of,
)
from specdec.kernels.warp_roles import (
    added,
    column_beside,
    filled,
    finished_split,
    next_scores,
    no_keys_beside,
    tile_layout,
    weights_of,
)


@gluon_jit
def own_work(path_starts_ptr, shares, requests, TOKENS: gl.constexpr, VARIANT: gl.constexpr):
    """A program's batch slot, first row of the slot's, kv head; its splits.

    Of these: how many tiles they have, whether they are left as one, where they are listed and the
    first two of them, the request's blocks and that of the first tile. The first keys wait for all
    of this, which takes two lookups, one after the other.
    """
    shares_ptr, fewer, counts, width = shares
    block_table_ptr, idx_ptr, R, M = requests
    turn, sharers, b = gl.program_id(0), gl.num_programs(0), gl.program_id(2)
    tile, g = gl.program_id(1) // VARIANT.kv_heads, gl.program_id(1) % VARIANT.kv_heads
    begin = gl.load(path_starts_ptr + b, cache_modifier=".cg").to(gl.int32)
    slot = gl.load(idx_ptr + b, cache_modifier=".cg").to(gl.int32)
    sharing = num_sharing(begin, sharers, fewer)
    own_ptr = shares_ptr + share_at(begin, turn, sharing, sharers, counts, width)
    blocks_ptr = block_table_ptr + gl.where(slot < 0, R, slot).to(gl.int64) * M
    split = first_split(begin, turn, sharing)
    block = gl.load(blocks_ptr + split_start(split) // 64, cache_modifier=".cg").to(gl.int32)
    num_tiles = gl.load(own_ptr, cache_modifier=".cg").to(gl.int32)
    listed = own_ptr + 1, split, split_at(own_ptr + 2)
    is_merged = merges(turn, sharing).to(gl.int32)
    return b, tile * TOKENS, g, (num_tiles, is_merged, listed, (blocks_ptr, block))


@gluon_jit
def split_at(own_ptr):
    """The split that is listed there."""
    return gl.load(own_ptr, cache_modifier=".cg").to(gl.int32)


@gluon_jit
def attend_upper(own, rings, bars, query_len, parts, scale, VARIANT: gl.constexpr):
    _attend(own, rings, bars, query_len, parts, scale, VARIANT, 0)


@gluon_jit
def attend_lower(own, rings, bars, query_len, parts, scale, VARIANT: gl.constexpr):
    _attend(own, rings, bars, query_len, parts, scale, VARIANT, 1)


@gluon_jit
def _attend(own, rings, bars, query_len, parts, scale, VARIANT: gl.constexpr, HALF: gl.constexpr):
    """What four warps do: half the query rows, for each of the program's splits.

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
    place = b, first_row + HALF * (TOKENS // 2), g
    after = tiles_of(split)  # of the split, after the tile whose values are added
    q = filled(q_ring, bars[0], 0, True).reshape([TOKENS * GROUP, C])
    q = q.slice(HALF * (TOKENS * GROUP // 2), TOKENS * GROUP // 2)
    q = q.load(gl.DotOperandLayout(0, tile_layout(S), 2))
    whole_peak, whole_total, whole_acc = no_keys_beside(q.shape[0], C, C)
    peak, total, acc = no_keys_beside(q.shape[0], S, C)
    decay = gl.zeros_like(total)
    weights = gl.zeros([q.shape[0], S], gl.float32, tile_layout(S))
    is_later = False
    filled(k_ring, bars[1], 0, True)
    # All in one loop, since other code for the first and the last tile would take longer to fetch
    # than to run. Before the first tile there is one whose weights are 0; `is_later` drops what it
    # adds, even NaN: its place in the ring may hold anything. So may that of the tile after the
    # last one, and nothing reads its scores.
    for step in range(-1, num_tiles):
        is_there = step >= 0
        is_later = is_later & (step > 0)
        scores, acc, summed = next_scores(
            q, rings, bars, step, weights, acc, is_later, HALF, is_there
        )
        is_later = after > 0
        before = gl.where(is_later, peak, float("-inf"))
        weights, next_decay, next_peak = weights_of(scores, None, 0, scale, before, False)
        filled(k_ring, bars[1], step + 2, step + 2 < num_tiles)
        acc, weights, total = added(rings, bars, step, acc, summed, weights, total, decay, is_there)
        if is_later:
            acc = acc * column_beside(next_decay, acc)
            after -= 1
        else:
            whole = whole_peak, whole_total, whole_acc
            whole_peak, whole_total, whole_acc = finished_split(whole, peak, total, acc)
            if (is_merged == 0) | (step == num_tiles - 1):
                whole = whole_peak, whole_total, whole_acc
                _store(parts, split, place, whole, query_len, GROUP, VARIANT, HALF)
                whole_peak, whole_total, whole_acc = no_keys_beside(q.shape[0], C, C)
            total = gl.zeros_like(total)
            own_ptr += 1
            split, following = following, split_at(own_ptr + 1)
            after = tiles_of(split) - 1
        peak, decay = next_peak, next_decay
    hopper.tma.store_wait(0)


@gluon_jit
def _store(
    parts,
    split,
    place,
    part,
    query_len,
    GROUP: gl.constexpr,
    VARIANT: gl.constexpr,
    HALF: gl.constexpr,
):
    """Leave the partial result of each row, as `store_part` in parts.py."""
    acc_desc, stats_ptr, NS, results = parts
    b, first_row, g = place
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
