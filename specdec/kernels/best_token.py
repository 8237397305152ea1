"""The best token after each row: the greatest of logits = x W^T in float32, lowest id of equals.

Where a model has a factor of its logits, they are compared after it, since rounding may make equal
what was not: others see them so, too.

A row without a choice gives a marker, which is no id: NO_TOKEN where all logits are -inf,
NOT_FINITE where one is NaN or +inf. NaN counts as +inf, so the maximum tells all three cases apart.

The logits are never written: each program reduces its tile to a maximum and an id, a second kernel
reduces the tiles. Where the vocabulary is cut, ranks exchange one maximum and id a row. The product
is that of `linear`, so the logits are those that it would write. With the sum of each tile's
exp(logit - maximum), the best token's probability needs no other pass.

min_tokens: before a request's min_position its stop ids cannot be drawn.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import is_hopper, jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.backend import backend
from specdec.kernels.best_of_ranks import launch_best_of_ranks
from specdec.kernels.block_sums import powers_of, sum_over_ids
from specdec.kernels.cut_ids import CutIds, columns_of, first_id, greatest_over_ids
from specdec.kernels.linear import (
    describe,
    describe_rows,
    linear_ref,
    sums_of,
    tile_options,
)
from specdec.kernels.overlap import begin, let_the_next_start, wait_for_inputs
from specdec.kernels.tile_shapes import row_class
from specdec.kernels.tiles import (
    Tiles,
    choose_tiles,
    gpu_name,
    num_tiles,
    place_of,
    tiles_for,
)

NO_TOKEN, NOT_FINITE = -1, -2


class StopMask(NamedTuple):
    """The ids that a row may not take."""

    positions: Tensor  # [T] of the rows; a drawn token comes one later
    states: Tensor  # [T] state row of every row, -1 = padding
    min_positions: Tensor  # [R + 1] by state row
    stop_ids: Tensor  # [R + 1, P] padded by repeating an id


class TileMaxima(NamedTuple):
    """The greatest score of each tile of ids and each row."""

    best: Tensor  # [tiles, T] float32, the greatest score
    ids: Tensor  # [tiles, T] int32, its lowest id
    sums: Tensor | None = None  # [tiles, T] float32, of exp(score - best); see confidence_ref


def best_token(
    x_TD: Tensor,
    weight_VD: Tensor,
    out_T: Tensor,
    mask: StopMask | None = None,
    factor: float = 1.0,
    cut: CutIds | None = None,
) -> None:
    """Write the best id after every row to out_T (int64, may be strided).

    factor: of logits. cut: the ids of the weight's rows, where others have the rest
    """
    if use_triton(x_TD):
        maxima = launch_tile_maxima(x_TD, weight_VD, mask, factor=factor, cut=cut)
        launch_write(maxima.best, maxima.ids, out_T, cut)
    else:
        out_T.copy_(best_token_ref(x_TD, weight_VD, mask, factor, cut))


def launch_write(best: Tensor, ids: Tensor, out_T: Tensor, cut: CutIds | None = None) -> None:
    """Reduce the maxima of tiles [tiles, T] of all ranks to ids and markers."""
    if cut is not None:
        best, ids = launch_best_of_ranks(best, ids, cut)
    tiles, T = best.shape
    options = {"BLOCK": next_power_of_2(tiles), "num_warps": 4} | launch_options(best)
    _write_kernel[(T,)](out_T, best, ids, out_T.stride(0), tiles, best.stride(0), **options)


def join_tiles(maxima: TileMaxima, cut: CutIds | None, ids_each: int) -> TileMaxima:
    """Collect the maxima of all ranks' tiles of so many ids, as one GPU has them."""
    if cut is None:
        return maxima
    best, ids, sums = maxima
    parts = [best, ids.view(torch.float32), *([] if sums is None else [sums])]
    best, ids, *more = cut.joined(torch.stack(parts), 1, ids_each)
    return TileMaxima(best, ids.view(torch.int32), *more)


def head_tiles(x_TD: Tensor, weight_VD: Tensor, cut: CutIds | None) -> Tiles:
    """Choose the tiles of the whole head, on any rank."""
    if cut is None:
        return tiles_for("whole", x_TD, weight_VD)
    T, D = x_TD.shape
    gpu, has_wgmma = gpu_name(x_TD.device), is_hopper(x_TD.device)
    return choose_tiles("whole", row_class(T), cut.vocab_size, D, x_TD.dtype, gpu, has_wgmma)


def launch_tile_maxima(
    x_TD: Tensor,
    weight_VD: Tensor,
    mask: StopMask | None = None,
    has_sums: bool = False,
    tiles: Tiles | None = None,
    factor: float = 1.0,
    cut: CutIds | None = None,
) -> TileMaxima:
    """tiles: None: the fastest that are known, as everywhere but in tuning"""
    other = backend.get().tile_maxima
    if other is not None:
        assert not has_sums, "another's product of the head leaves no sums"
        assert cut is None, "another's product of the head knows no ranks"
        best, ids = other(x_TD, weight_VD)
        return TileMaxima(best * factor, ids)
    T, D = x_TD.shape
    V = len(weight_VD)
    tiles = tiles or head_tiles(x_TD, weight_VD, cut)
    n_tiles = -(-V // tiles.block_n)
    best = torch.empty(n_tiles, T, dtype=torch.float32, device=x_TD.device)
    ids = torch.empty(n_tiles, T, dtype=torch.int32, device=x_TD.device)
    sums = torch.empty_like(best) if has_sums else best
    masks = (ids,) * 4 if mask is None else mask
    num_states, num_ids = 0, 0
    if mask is not None:
        num_states, num_ids = len(mask.min_positions) - 1, mask.stop_ids.shape[1]
    descs = (*describe_rows(x_TD, tiles), describe(weight_VD, tiles.block_n, tiles.block_k))
    flags = {"HAS_MASK": mask is not None, "HAS_SUMS": has_sums, "STOP_IDS": num_ids}
    options = tile_options(x_TD, tiles)
    _tile_maxima_kernel[(num_tiles(V, T, tiles),)](
        *(best, ids, sums, *descs, *masks, num_states, T, V, D, first_id(cut)),
        FACTOR=factor,
        **flags,
        **options,
    )
    return TileMaxima(best, ids, sums if has_sums else None)


@jit(varying=("T",))
def _tile_maxima_kernel(
    best_ptr,  # [tiles, T] float32
    ids_ptr,  # [tiles, T] int32
    sums_ptr,  # [tiles, T] float32, with HAS_SUMS
    x_desc,  # [T, D] in tiles [BLOCK_M, BLOCK_K]
    tail_desc,  # [T, D] in tiles [TAIL, BLOCK_K]
    w_desc,  # [V, D] in tiles [BLOCK_N, BLOCK_K]
    positions_ptr,  # [T]
    states_ptr,  # [T]
    min_positions_ptr,  # [R + 1]
    stop_ids_ptr,  # [R + 1, STOP_IDS]
    R,
    T,
    V,
    D,
    first,  # id of the first row of w
    HAS_MASK: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
    FACTOR: tl.constexpr = 1.0,
):
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    tile, m_tile = place_of(tl.program_id(0), tl.cdiv(V, BLOCK_N), tl.cdiv(T, BLOCK_M + TAIL))
    m0 = m_tile * (BLOCK_M + TAIL)
    wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    outs = (best_ptr, ids_ptr, sums_ptr)
    mask = (positions_ptr, states_ptr, min_positions_ptr, stop_ids_ptr, R) if HAS_MASK else None
    blocks = tl.cdiv(D, w_desc.block_shape[1])
    descs = (x_desc, tail_desc, w_desc)
    logits, rest = sums_of(descs, tile * BLOCK_N, m0, 0, blocks, TAIL, 1)
    let_the_next_start(PDL)
    if TAIL > 0:
        _reduce(outs, rest, tile, m0 + BLOCK_M, (T, V, first), mask, HAS_SUMS, STOP_IDS, FACTOR)
    _reduce(outs, logits, tile, m0, (T, V, first), mask, HAS_SUMS, STOP_IDS, FACTOR)


@jit
def _reduce(
    outs,
    logits,
    tile,
    m0,
    sizes,
    mask,
    HAS_SUMS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Reduce a tile of logits to each row's maximum, its id and the sum. outs, mask: pointers."""
    if FACTOR != 1.0:
        logits = logits * FACTOR
    best_ptr, ids_ptr, sums_ptr = outs
    T, V, first = sizes
    n = first + tile * logits.shape[0] + tl.arange(0, logits.shape[0])
    m = m0 + tl.arange(0, logits.shape[1])
    logits = tl.where((n < first + V)[:, None], logits, float("-inf"))
    if mask is not None:
        positions_ptr, states_ptr, min_positions_ptr, stop_ids_ptr, R = mask
        idx = tl.load(states_ptr + m, mask=m < T, other=-1)
        row = tl.where(idx < 0, R, idx)
        position = tl.load(positions_ptr + m, mask=m < T, other=0)
        is_early = (position + 1 < tl.load(min_positions_ptr + row)) & (m < T)
        if tl.max(is_early.to(tl.int32), axis=0) > 0:
            for p in range(STOP_IDS):
                stop_id = tl.load(stop_ids_ptr + row * STOP_IDS + p)
                is_out = (n[:, None] == stop_id[None, :]) & is_early[None, :]
                logits = tl.where(is_out, float("-inf"), logits)
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, axis=0)
    lowest = tl.min(tl.where(logits == best[None, :], n[:, None], 1 << 30), axis=0)
    at = tile * T + m
    tl.store(best_ptr + at, best, mask=m < T)
    tl.store(ids_ptr + at, lowest, mask=m < T)
    if HAS_SUMS:
        powers = tl.exp(logits - best[None, :])
        tl.store(sums_ptr + at, tl.sum(powers, axis=0), mask=m < T)


@jit(varying=("out_ptr", "stride_out", "tiles", "T"))
def _write_kernel(
    out_ptr,  # [T]
    best_ptr,  # [tiles, T]
    ids_ptr,  # [tiles, T]
    stride_out,
    tiles,
    T,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0)
    token = lowest_best(best_ptr, ids_ptr, t, tiles, T, BLOCK)
    tl.store(out_ptr + t * stride_out, token.to(tl.int64))


@jit
def lowest_best(best_ptr, ids_ptr, t, tiles, T, BLOCK: tl.constexpr):
    """Find the lowest id among the greatest of one row's tiles, or a marker."""
    i = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + i * T + t, mask=i < tiles, other=float("-inf"))
    ids = tl.load(ids_ptr + i * T + t, mask=i < tiles, other=1 << 30)
    return id_or_marker(tl.max(best, axis=0), best, ids)


@jit
def confidence(best_ptr, sums_ptr, scale, t, tiles, T, BLOCK: tl.constexpr):
    """Compute exp(scale x greatest score) over the sum of all; 0 for a row without a choice.

    sums: of exp(scale x (score - best)), by tile
    """
    i = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + i * T + t, mask=i < tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + i * T + t, mask=i < tiles, other=0.0)
    top = tl.max(best, axis=0)
    parts = tl.where(best > float("-inf"), sums * tl.exp(scale * (best - top)), 0.0)
    share = 1.0 / tl.sum(parts, axis=0)
    return tl.where((tl.abs(top) < float("inf")) & (share <= 1.0), share, 0.0)


@jit
def id_or_marker(top, best, ids):
    """Find the lowest of the ids whose score is the greatest; 1 << 30 is above all."""
    lowest = tl.min(tl.where(best == top, ids, 1 << 30), axis=0)
    return tl.where(top == float("inf"), -2, tl.where(top == float("-inf"), -1, lowest))


def best_token_ref(
    x_TD: Tensor,
    weight_VD: Tensor,
    mask: StopMask | None = None,
    factor: float = 1.0,
    cut: CutIds | None = None,
) -> Tensor:
    logits_TV = linear_ref(x_TD, weight_VD, None, torch.float32)
    if factor != 1.0:
        logits_TV *= factor
    if mask is not None:
        stop_TP, is_here_TP = columns_of(mask.stop_ids[mask.states], logits_TV, cut)
        is_early_T1 = (mask.positions + 1 < mask.min_positions[mask.states])[:, None]
        kept_TP = logits_TV.gather(1, stop_TP).nan_to_num(torch.inf, torch.inf, -torch.inf)
        left_TP = torch.where(is_early_T1 & is_here_TP, -torch.inf, kept_TP)
        # ids of other ranks share a column with one that may be out
        logits_TV.scatter_reduce_(1, stop_TP, left_TP, "amin", include_self=False)
    return id_or_marker_ref(logits_TV, cut)


def id_or_marker_ref(scores_TV: Tensor, cut: CutIds | None = None) -> Tensor:
    """Find the lowest id of the greatest score of each row, or a marker."""
    counted_TV = torch.where(scores_TV.isnan(), torch.inf, scores_TV)
    id_T = counted_TV.argmax(dim=-1)
    best_T = counted_TV.gather(1, id_T[:, None])[:, 0]
    if cut is not None:  # a float64 holds either
        pair_2T = torch.stack([best_T.double(), (id_T + cut.first).double()])
        best_nT, id_nT = cut.exchange.gather(pair_2T).unbind(1)
        rank_1T = best_nT.argmax(dim=0, keepdim=True)  # the first of equals
        best_T, id_T = best_nT.gather(0, rank_1T)[0], id_nT.gather(0, rank_1T)[0].long()
    id_T = torch.where(best_T == -torch.inf, NO_TOKEN, id_T)
    return torch.where(best_T == torch.inf, NOT_FINITE, id_T)


def confidence_ref(scores_TV: Tensor, scale_T: Tensor, cut: CutIds | None = None) -> Tensor:
    """Compute the share of each row's greatest exp(scale x score), 0 for a row without a choice."""
    top_T = greatest_over_ids(scores_TV, cut)[:, 0]
    powers_TV = powers_of(scale_T[:, None] * (scores_TV - top_T[:, None]))
    share_T = 1 / sum_over_ids(powers_TV, cut)[:, 0]
    return torch.where(top_T.isfinite() & (share_T <= 1), share_T, 0)
