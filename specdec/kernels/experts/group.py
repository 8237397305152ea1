"""Pairs of row and slot, sorted by expert, and the tiles of rows that each expert has.

A pair is t * k + s. Pairs of one expert keep their order, so that places repeat too; pairs of
padding have no place. A tile is up to `block_m` places of one expert; there are no more than
`most_tiles`, which depends on the number of pairs alone.

Two launches: one program an expert counts its pairs before each block of PAIRS; then one program a
block finds its pairs' places, and others make tiles of the counts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin

PAIRS = 128  # of a block
BLOCKS = 32  # that are counted at a time
TILES = 64  # that a program makes


class Groups(NamedTuple):
    """Where pairs are, and what tiles cover them."""

    pair_P: Tensor  # [P] int32, the pair at each place; after the last one anything
    tiles_M3: Tensor  # [M, 3] int32: expert, first place, place after the last; not before: no tile
    place_P: Tensor  # [P] int32, the place of each pair; padding: -1
    count_1: Tensor  # [1] int32, how many tiles there are; they come first


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Count the tiles that suffice: every expert has no more than one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block_m


def group(ids_TS: Tensor, num_experts: int, block_m: int) -> Groups:
    """Sort pairs by expert. ids [T, k] int32, contiguous; num_experts: padding."""
    if not use_triton(ids_TS):
        return group_ref(ids_TS, num_experts, block_m)
    assert ids_TS.is_contiguous(), ids_TS.stride()
    P, E = ids_TS.numel(), num_experts
    M, B = most_tiles(P, E, block_m), -(-P // PAIRS)
    pair_P, tiles_M3 = ids_TS.new_empty(P), ids_TS.new_empty(M, 3)
    place_P, count_1 = ids_TS.new_empty(P), ids_TS.new_empty(1)
    before_EB, count_E = ids_TS.new_empty(E, B), ids_TS.new_empty(E)
    options = {"PAIRS": PAIRS, "num_warps": 8} | launch_options(ids_TS)
    _count_kernel[(E,)](before_EB, count_E, ids_TS, P, B, BLOCKS=BLOCKS, **options)
    sizes = {"BLOCK_M": block_m, "BLOCK_E": next_power_of_2(E), "TILES": TILES}
    groups = Groups(pair_P, tiles_M3, place_P, count_1)
    tensors = (*groups, ids_TS, before_EB, count_E)
    _place_kernel[(B + -(-M // TILES),)](*tensors, P, B, M, E, **sizes, **options)
    return groups


@jit(varying=("P", "B"))
def _count_kernel(
    before_ptr,  # [E, B]
    count_ptr,  # [E]
    ids_ptr,  # [P]
    P,
    B,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    e = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    p = b[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    before = tl.zeros([], tl.int32)
    for first in range(0, B, BLOCKS):
        at = first * PAIRS + p
        ids = tl.load(ids_ptr + at, mask=at < P, other=-1)
        counts = tl.sum((ids == e).to(tl.int32), axis=1)
        befores = before + tl.cumsum(counts, axis=0) - counts
        tl.store(before_ptr + e * B + first + b, befores, mask=first + b < B)
        before += tl.sum(counts, axis=0)
    tl.store(count_ptr + e, before)


@jit(varying=("P", "B", "M"))
def _place_kernel(
    pair_ptr,  # [P]
    tiles_ptr,  # [M, 3]
    place_ptr,  # [P]
    num_tiles_ptr,  # [1]
    ids_ptr,  # [P]
    before_ptr,  # [E, B]
    count_ptr,  # [E]
    P,
    B,
    M,
    E,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    e = tl.arange(0, BLOCK_E)
    count = tl.load(count_ptr + e, mask=e < E, other=0)
    start = tl.cumsum(count, axis=0) - count
    b = tl.program_id(0)
    if b < B:
        i = tl.arange(0, PAIRS)
        p = b * PAIRS + i
        ids = tl.load(ids_ptr + p, mask=p < P, other=E)
        is_pair = ids < E
        before = tl.load(before_ptr + ids * B + b, mask=is_pair, other=0)
        others = tl.load(ids_ptr + p[None, :], mask=p[None, :] < P, other=E)
        is_before = (others == ids[:, None]) & (i[None, :] < i[:, None])
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        place = tl.gather(start, tl.minimum(ids, E - 1), axis=0) + before + rank
        tl.store(pair_ptr + place, p, mask=is_pair)
        tl.store(place_ptr + p, tl.where(is_pair, place, -1), mask=p < P)
    else:
        tiles = (count + BLOCK_M - 1) // BLOCK_M
        end = tl.cumsum(tiles, axis=0)
        tl.store(num_tiles_ptr, tl.max(end, axis=0), mask=b == B)
        m = (b - B) * TILES + tl.arange(0, TILES)
        is_past = (end[None, :] <= m[:, None]) & (e[None, :] < E)
        expert = tl.sum(is_past.to(tl.int32), axis=1)
        at = tl.minimum(expert, E - 1)
        first_tile = tl.gather(end - tiles, at, axis=0)
        first = tl.gather(start, at, axis=0)
        last = first + tl.gather(count, at, axis=0)
        tl.store(tiles_ptr + m * 3, at, mask=m < M)
        tl.store(tiles_ptr + m * 3 + 1, first + (m - first_tile) * BLOCK_M, mask=m < M)
        tl.store(tiles_ptr + m * 3 + 2, last, mask=m < M)


def group_ref(ids_TS: Tensor, num_experts: int, block_m: int) -> Groups:
    ids_P = ids_TS.flatten()
    P, E = len(ids_P), num_experts
    sorted_P, pair_P = ids_P.sort(stable=True)
    count_E = (sorted_P == torch.arange(E, device=ids_P.device)[:, None]).sum(1)
    start_E = count_E.cumsum(0) - count_E
    tiles_E = (count_E + block_m - 1) // block_m
    end_E = tiles_E.cumsum(0)
    tile_M = torch.arange(most_tiles(P, E, block_m), device=ids_P.device)
    expert_M = (end_E <= tile_M[:, None]).sum(1).clamp(max=E - 1)
    first_M = start_E[expert_M] + (tile_M - end_E[expert_M] + tiles_E[expert_M]) * block_m
    last_M = start_E[expert_M] + count_E[expert_M]
    place_P = pair_P.argsort().where(ids_P < E, -1)
    tiles_M3 = torch.stack([expert_M, first_M, last_M], dim=1)
    return Groups(pair_P.int(), tiles_M3.int(), place_P.int(), end_E[-1:].int())
