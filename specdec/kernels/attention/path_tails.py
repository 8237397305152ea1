"""Attention over the last keys of rows whose paths are stored one slot at a time, as a tree's are.

The rows of a request are nodes of a tree; their paths share the keys below position `starts` and
go on in cache slots named row by row. Programs of walk.py attend to the splits of shared keys
before the one in which the paths begin, many rows at once. Beside them, in the same launch, one
program a row and kv head attends to that split, shared keys and the row's own, and to the next one
if the path reaches it. All leave partial results, which combine.py adds up. A key has the column of
its position in its tile, whichever slot it lies in, so a row gets the bits of plain decoding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.kernels.attention.parts import store_part
from specdec.kernels.attention.query_rows import Paths
from specdec.kernels.attention.splits import (
    Part,
    attend_tile,
    attend_tile_ref,
    no_keys,
    split_of,
    split_start,
)
from specdec.kernels.attention.tile_rows import load_queries
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.invariant import ROWS as TILE_ROWS
from specdec.kernels.overlap import begin_beside

LONGEST = 64  # rows of a path, the keys of the smallest split: it reaches two at most
MIN_ROWS = 16  # of a product: the query heads of a kv head, and padding


@jit
def attend_path(
    t,
    g,
    is_busy,
    q_ptr,
    workspace,
    path,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What a program does for row t of the pass: leave its partial results.

    workspace: values, peaks and totals, results of a row. path: the caches and blocks, the slots of
    the row's path, where it starts, how many slots there are, the row's position
    """
    acc_ptr, stats_ptr, NS = workspace
    keys, _, path_start, D1, position = path
    i = tl.arange(0, ROWS)
    head = g * (H // G) + i
    inside = i < H // G
    first = split_of(path_start // S * S)
    split = first
    begin = split_start(first)
    # a row of padding may end before that split, or after the path; then it has no keys here
    has_keys = (position >= begin) & (position - path_start < D1)
    end = tl.where(has_keys, position + 1, begin)
    slot, is_seen = _slots_of_tile(path, begin, S)
    begin_beside(0, PDL)
    if is_busy:
        q = load_queries(q_ptr, t, head, inside, H, C)
        parts = acc_ptr, stats_ptr, (t * H + head).to(tl.int64) * NS, inside
        peak, total, acc = no_keys(ROWS, C)
        for start in range(begin, end, S):
            if start == split_start(split + 1):
                store_part(parts, _place_of(split, first, IS_SPLIT), peak, total, acc, C)
                peak, total, acc = no_keys(ROWS, C)
                split += 1
            k, v = _load_path_keys(keys, slot, is_seen, g, G, S, C)
            next_slot, is_next_seen = _slots_of_tile(path, start + S, S)
            peak, total, acc = attend_tile(q, k, v, is_seen[None, :], scale, peak, total, acc)
            slot, is_seen = next_slot, is_next_seen
        if has_keys or not IS_SPLIT:  # split by split there may be no place for nothing
            store_part(parts, _place_of(split, first, IS_SPLIT), peak, total, acc, C)
        if not IS_SPLIT:  # noqa: SIM102  # what is compiled
            if split == first:  # there is no other: combine.py looks for one
                peak, total, acc = no_keys(ROWS, C)
                store_part(parts, 2, peak, total, acc, C)


@jit
def _place_of(split, first, IS_SPLIT: tl.constexpr):
    """A split's partial result: in order, or after all before `first`, which are one."""
    return split if IS_SPLIT else split - first + 1


@jit
def _slots_of_tile(path, start, S: tl.constexpr):
    """Cache slots of a tile's keys on a row's path, and which of them it sees. [S]"""
    keys, slots_ptr, path_start, D1, position = path
    s = tl.arange(0, S)
    key = start + s
    j = key - path_start
    is_named = (j >= 0) & (j < D1) & (key <= position)
    slot = tl.load(slots_ptr + j, mask=is_named, other=-1, cache_modifier=".cg").to(tl.int64)
    has_shared = start < path_start
    block = tl.load(keys[2] + start // S, mask=has_shared, other=0, cache_modifier=".cg")
    slot = tl.where(j < 0, block.to(tl.int64) * S + s, slot)
    return slot, (slot >= 0) & (key <= position)


@jit
def _load_path_keys(keys, slot, is_seen, g, G: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Keys and values [S, block of C] of a tile."""
    k_ptr, v_ptr, _ = keys
    at = ((slot // S * G + g) * S + slot % S)[:, None] * C + columns(C)[None, :]
    is_read = inside_columns(is_seen, C)
    k = tl.load(k_ptr + at, mask=is_read, other=0.0, cache_modifier=".cg")
    v = tl.load(v_ptr + at, mask=is_read, other=0.0, cache_modifier=".cg")
    return k, v


def paths_of_tiles(paths: Paths, rows: Tensor, reqs: Tensor) -> Paths:
    """For each query tile of the twin: slots [tiles, 8, D + 1], starts [tiles].

    rows: [tiles x 8] row of the step, T = no row. reqs: [tiles] batch slot.
    """
    slots = F.pad(paths.slots, (0, 0, 0, 1), value=-1)[rows]
    return Paths(slots=slots.view(-1, TILE_ROWS, slots.shape[1]), starts=paths.starts[reqs])


def path_tails_ref(
    q: Tensor, cache: Tensor, blocks: Tensor, position: Tensor, paths: Paths, part: Part
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
        is_seen = is_seen.view(NT * R, 1, 1, 1, S)
        slot = slot.clamp(min=0).view(NT * R, S)
        kv = cache[:, slot // S, :, slot % S].float()  # [NT x 8, S, 2, G, C]
        k, v = kv.permute(2, 0, 3, 1, 4)
        each = attend_tile_ref(q, k, v, is_seen, is_seen, each)
        start = start + S
    return Part(*(x.unflatten(0, (NT, R)).diagonal(0, 1, 4).movedim(-1, 3) for x in each))


def _for_each_row(x: Tensor) -> Tensor:
    """Every tile 8 times: [tiles, ...] to [tiles x 8, ...]."""
    return x.repeat_interleave(TILE_ROWS, dim=0)
