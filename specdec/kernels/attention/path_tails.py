"""Attention over the last keys of rows whose paths are stored one slot at a time.

The rows of a request are nodes; their paths share the keys below position `starts` and go on in
cache slots named row by row. Programs of walk.py or wide_walk.py attend to the splits of shared
keys before the one in which the paths begin, many rows at once. Beside them others attend to
that split, first the shared tiles of it, then the rows' own keys and those beside them, and to the
next one, where paths reach it. All leave partial results, which combine.py adds up.

A key of a row has a column whose place among 16 is that of its position in its tile, whichever slot
it lies in, and columns between are exact zeros to the row. Products add up 16 columns after 16, so
a row gets the bits of plain decoding. So 1, 2 or 4 nodes share a tile of 128 columns: 64 for the
keys that all of them see, 64 for the others, 16, 32 or 64 for each node.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, next_power_of_2, tl
from specdec.kernels.attention.launch_plan import HeadShape
from specdec.kernels.attention.parts import store_part
from specdec.kernels.attention.query_rows import Paths
from specdec.kernels.attention.splits import (
    Part,
    attend_split,
    attend_tile,
    attend_tile_ref,
    first_block,
    first_seen,
    no_keys,
    split_of,
    split_start,
)
from specdec.kernels.attention.tile_rows import load_queries, positions_of_paths
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.invariant import ROWS as TILE_ROWS
from specdec.kernels.kept import store_kept
from specdec.kernels.overlap import asked_for, begin_beside, end_beside

LONGEST = 64  # keys of a path, those of the smallest split: it reaches two at most
MIN_ROWS = 16  # of a product
STEP = 16  # columns that a tensor core adds up at once
MOST_NODES = 4  # of a program
TOGETHER = 256  # bytes of a key up to which a program has several nodes


class TailPrograms(NamedTuple):
    """The programs for the last keys of paths, of one pass, for each kv head of a batch slot."""

    of_slot: int  # as many as a slot's rows have pieces, at most
    rows: int  # of a product
    are_shared: bool  # several nodes share one

    @staticmethod
    def of(max_query_len: int, path_len: int, heads: HeadShape) -> "TailPrograms":
        """path_len: keys of a path."""
        rows = next_power_of_2(heads.group)
        if heads.C * heads.itemsize > TOGETHER:
            return TailPrograms(2 * max_query_len, max(rows, MIN_ROWS), False)
        # enough of them wherever paths begin: short ones touch two steps of a split, or one, and
        # then maybe one of the next split; of longer ones each node may be in both splits
        each = MOST_NODES if path_len <= STEP + 1 else 1
        of_slot = 2 * -(-max_query_len // each)
        return TailPrograms(of_slot, max(rows * MOST_NODES, MIN_ROWS), True)


@jit
def attend_paths(
    place, q_ptr, workspace, path, how, SIZES: tl.constexpr, PDL: tl.constexpr, CUT: tl.constexpr
):
    """Attend for a piece of a slot's rows, 1, 2 or 4 nodes, and leave partial results.

    place: the piece, and the slot's rows; first all nodes in the split in which paths begin, then
    all in the next one, if one gets there. workspace: values, peaks and totals, results of a row.
    path: the caches and blocks, positions, slots of the rows' paths, where these start, how many
    slots a row has. how: factor of scores, whether it is needed, see `begin_beside`, the window.
    SIZES: H, G, S, C. CUT: IS_SPLIT and GROUP of walk.py, rows of a product, columns for keys that
    nodes share
    """
    H: tl.constexpr = SIZES[0]
    G: tl.constexpr = SIZES[1]
    S: tl.constexpr = SIZES[2]
    C: tl.constexpr = SIZES[3]
    tl.static_assert(S == 64)
    IS_SPLIT: tl.constexpr = CUT[0]
    GROUP: tl.constexpr = CUT[1]
    ROWS: tl.constexpr = CUT[2]
    SHARED: tl.constexpr = CUT[3]
    piece, row_start, row_end, g = place
    scale, is_needed, is_beside, window = how
    acc_ptr, stats_ptr, NS = workspace
    keys, positions_ptr, slots_ptr, path_start, D1 = path
    path_tile = path_start // S * S
    border = split_start(split_of(path_tile) + 1)
    beyond = path_start + D1 - border
    first_shift = _shift(path_start % 16 + tl.minimum(D1, border - path_start), SHARED)
    next_shift = _shift(beyond, SHARED)
    num_rows = row_end - row_start
    of_first = ((num_rows << first_shift) + S - 1) // S
    of_next = tl.where(beyond > 0, ((num_rows << next_shift) + S - 1) // S, 0)
    if piece >= tl.maximum(of_first + of_next, 1):
        return  # without a wait; the first program always has a piece, and waits for all
    is_next = (piece >= of_first).to(tl.int32)
    split = split_of(path_tile) + is_next
    begin = split_start(split)
    shift = tl.where(is_next > 0, next_shift, first_shift)
    nodes = S >> shift
    first_row = row_start + (piece - is_next * of_first) * nodes
    i = tl.arange(0, ROWS)
    node, head = i // GROUP, g * (H // G) + i % GROUP
    t = first_row + node
    inside = (node < nodes) & (t < row_end) & (i % GROUP < H // G)
    position = tl.load(positions_ptr + t, mask=inside, other=-1, cache_modifier=".cg")
    position = position.to(tl.int32)
    # a row of padding may end before that split, or after the path; then it has no keys here
    is_on_path = position - path_start < D1
    has_keys = (position >= begin) & is_on_path
    last = tl.max(tl.where(has_keys, position, -1), axis=0)
    first_tile = tl.maximum(path_tile, begin)  # in which the rows have keys of their own
    end = tl.minimum(split_start(split + 1), tl.maximum(last, first_tile) + 1)
    at, first, first_key, seen_from = None, None, None, None
    if window is not None:
        at, first = positions_of_paths(t, inside, positions_ptr, path_start)
        first_key, seen_from = first_seen(first, window), first_seen(at, window)
    rows = first_row, row_end, shift, positions_ptr, slots_ptr, path_start, D1, first_key, window
    block = first_block(keys, split, first, path_tile - 1, window, S)
    slot = _slots_of_tile(rows, keys, first_tile, -1, S, SHARED)
    begin_beside(is_beside, PDL)
    # Up to 1,024 keys, and often beyond: a program asks for all that it needs at once, one
    # tile. Each would take a microsecond after another.
    is_one_tile = (begin == path_tile) & (first_tile + S >= end)
    is_busy = is_needed & (first_row < row_end)
    q = load_queries(q_ptr, t, head, inside & is_busy, H, C)
    k, v = _load_path_keys(keys, tl.where(is_one_tile & is_busy, slot, -1), g, G, S, C)
    q, k, v = asked_for(q, PDL), asked_for(k, PDL), asked_for(v, PDL)
    if is_busy:
        is_stored = inside & has_keys  # there may be no place for more, where splits are shared
        first_part = (t * H + head).to(tl.int64) * NS + (split if IS_SPLIT else 1 + is_next)
        if not IS_SPLIT:
            # combine.py looks for two partial results after all others, which are one
            is_stored = inside & (has_keys | (is_next == 0))
            is_without = inside & (is_next == 0) & ((position < border) | ~is_on_path)
            store_kept(stats_ptr + (first_part + 1) * 2, float("-inf"), is_without)
        # All nodes at once; if not all results are numbers, one node after another, since values of
        # one may have reached others, though with a weight of 0.
        only, turns = -1, 0
        if is_one_tile:
            peak, total, acc = no_keys(ROWS, C)
            is_seen = _is_seen(slot, node, shift, first_tile, seen_from, SHARED)
            peak, total, acc = attend_tile(q, k, v, is_seen, scale, peak, total, acc)
            store_part((acc_ptr, stats_ptr, first_part, is_stored), 0, peak, total, acc, C)
            only, turns = 0, tl.where(_are_numbers(acc), 0, nodes)
            if turns > 0:
                slot = _slots_of_tile(rows, keys, first_tile, 0, S, SHARED)
        if (only < 0) | (turns > 0):
            shared_peak, shared_total, shared_acc = no_keys(ROWS, C)
            if begin < path_tile:
                shared_peak, shared_total, shared_acc = attend_split(
                    q,
                    keys,
                    block,
                    at,
                    first,
                    path_tile - 1,
                    split,
                    scale,
                    g,
                    window,
                    SIZES,
                    False,
                )
            peak, total, acc = shared_peak, shared_total, shared_acc
            start = first_tile
            while only < turns:
                k, v = _load_path_keys(keys, slot, g, G, S, C)
                k, v = asked_for(k, PDL), asked_for(v, PDL)
                is_seen = _is_seen(slot, node, shift, start, seen_from, SHARED)
                peak, total, acc = attend_tile(q, k, v, is_seen, scale, peak, total, acc)
                start += S
                if start >= end:
                    is_turn = is_stored & ((only < 0) | (node == only))
                    store_part((acc_ptr, stats_ptr, first_part, is_turn), 0, peak, total, acc, C)
                    if only < 0:
                        turns = tl.where(_are_numbers(acc), 0, nodes)
                    only += 1
                    start = first_tile
                    peak, total, acc = shared_peak, shared_total, shared_acc
                if only < turns:
                    slot = _slots_of_tile(rows, keys, start, only, S, SHARED)
    if tl.program_id(0) == 0:  # for all: see overlap.py
        end_beside(PDL)


@jit
def _shift(num_keys, SHARED: tl.constexpr):
    """Shift by this to get a node's columns, for its own keys from the beginning of a step on."""
    shift = tl.where(num_keys <= 16, 4, tl.where(num_keys <= 32, 5, 6))
    return shift if SHARED > 0 else tl.full((), 6, tl.int32)


@jit
def _is_seen(slot, node, shift, start, seen_from, SHARED: tl.constexpr):
    """Say which columns of the tile at key `start` each row sees. [rows, columns]

    seen_from: the first key of each row's window, or None
    """
    i = tl.arange(0, slot.shape[0])
    is_shared = (i < SHARED)[None, :]
    is_own = ((i - SHARED) >> shift)[None, :] == node[:, None]
    if seen_from is not None:
        is_shared = is_shared & ((start + i)[None, :] >= seen_from[:, None])
    is_mine = is_shared | is_own
    return (slot >= 0)[None, :] & is_mine


@jit
def _are_numbers(x):
    return tl.min((tl.abs(x) < float("inf")).to(tl.int32)) > 0


@jit
def _slots_of_tile(rows, keys, start, only, S: tl.constexpr, SHARED: tl.constexpr):
    """Find the cache slot of the key in each column of a tile, -1: there is none. [SHARED + S]

    First come those that all nodes share, up to the step of 16 keys in which paths begin. Then,
    node by node, those from this step on. only: of one node alone; -1: of all
    """
    first_row, row_end, shift, positions_ptr, slots_ptr, path_start, D1, first_key, window = rows
    i = tl.arange(0, SHARED + S)
    node = (i - SHARED) >> shift
    shared = tl.maximum(path_start - start, 0) // 16 * 16 if SHARED > 0 else 0
    column = tl.where(i < SHARED, i, shared + (i & ((1 << shift) - 1)))
    key = start + column
    j = key - path_start
    row = first_row + node
    is_own = (i >= SHARED) & (row < row_end) & (column < S) & (j < D1)
    is_own = is_own & ((only < 0) | (node == only))
    position = tl.load(positions_ptr + row, mask=is_own, other=-1, cache_modifier=".cg")
    is_named = is_own & (j >= 0)
    slot = tl.load(slots_ptr + row * D1 + j, mask=is_named, other=-1, cache_modifier=".cg")
    block = tl.load(keys[2] + start // S, mask=start < path_start, other=0, cache_modifier=".cg")
    slot = tl.where(is_named, slot.to(tl.int32), block.to(tl.int32) * S + column)
    is_shared, is_own = column < shared, is_own & (key <= position.to(tl.int32))
    if window is not None:
        is_shared = is_shared & (key >= first_key)
        is_own = is_own & (key > position.to(tl.int32) - window)
    is_there = tl.where(i < SHARED, is_shared, is_own)
    return tl.where(is_there, slot, -1)


@jit
def _load_path_keys(keys, slot, g, G: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Load keys and values [columns, block of C] of a tile."""
    k_ptr, v_ptr, _ = keys
    # 32 bits number the keys of all heads, as long as they take less than 500 GB
    at = ((slot // S * G + g) * S + slot % S).to(tl.int64)[:, None] * C + columns(C)[None, :]
    is_read = inside_columns(slot >= 0, C)
    k = tl.load(k_ptr + at, mask=is_read, other=0.0, cache_modifier=".cg")
    v = tl.load(v_ptr + at, mask=is_read, other=0.0, cache_modifier=".cg")
    return k, v


def paths_of_tiles(paths: Paths, rows: Tensor, reqs: Tensor) -> Paths:
    """Look up, for each query tile of the twin: slots [tiles, 8, D + 1], starts [tiles].

    rows: [tiles x 8] row of the step, T = no row. reqs: [tiles] batch slot.
    """
    slots = F.pad(paths.slots, (0, 0, 0, 1), value=-1)[rows]
    return Paths(slots=slots.view(-1, TILE_ROWS, slots.shape[1]), starts=paths.starts[reqs])


def path_tails_ref(
    q: Tensor,
    cache: Tensor,
    blocks: Tensor,
    position: Tensor,
    paths: Paths,
    part: Part,
    window: int | None = None,
) -> Part:
    """Take each row's own keys into the partial results of the shared ones.

    A tile is run once for each of its rows, on that row's keys; of each run only this row is kept.

    q:        [tiles x G, group x 8, C], scaled
    blocks:   [tiles, M]
    position: [tiles, 1, 1, 8, 1]
    paths:    of the tiles
    """
    NT, G, group, R, C = part.acc.shape
    S = cache.shape[3]
    D1 = paths.slots.shape[-1]
    each = Part(*(_for_each_row(x) for x in part))
    q = _for_each_row(q.view(NT, G, group * R, C)).flatten(0, 1)
    start = paths.starts // S * S
    for _ in range(1 + -(-(D1 - 1) // S)):  # as many as a path of D + 1 keys can touch
        key = (start[:, None] + torch.arange(S, device=q.device))[:, None]  # [NT, 1, S]
        j = key - paths.starts.view(-1, 1, 1)
        named = paths.slots.gather(2, j.clamp(0, D1 - 1).expand(-1, R, -1))
        block = blocks.gather(1, (start // S).clamp(max=blocks.shape[1] - 1)[:, None])
        slot = torch.where(j < 0, block[:, :, None] * S + key % S, named)
        is_seen = (slot >= 0) & (j < D1) & (key <= position.view(NT, R, 1))
        if window is not None:
            is_seen &= key > position.view(NT, R, 1) - window
        is_seen = is_seen.view(NT * R, 1, 1, 1, S)
        slot = slot.clamp(min=0).view(NT * R, S)
        kv = cache[:, slot // S, :, slot % S].float()  # [NT x 8, S, 2, G, C]
        k, v = kv.permute(2, 0, 3, 1, 4)
        each = attend_tile_ref(q, k, v, is_seen, is_seen, each)
        start = start + S
    return Part(*(x.unflatten(0, (NT, R)).diagonal(0, 1, 4).movedim(-1, 3) for x in each))


def _for_each_row(x: Tensor) -> Tensor:
    """Repeat every tile 8 times: [tiles, ...] to [tiles x 8, ...]."""
    return x.repeat_interleave(TILE_ROWS, dim=0)
