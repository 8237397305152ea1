"""A token per row of float32 logits: the greatest score, the lowest id of equals, or a marker.

score = logit / temperature + g for tokens at or above the row's floor (support_floor), with the
noise g of gumbel.py at the position of the drawn token. Temperature 0 is the case without noise and
floor. The kernel leaves a maximum and an id per tile, as best_token's does, for the same readers.

The exact noise costs as much as all else together, so a tile estimates it first and computes it
exactly for the tokens within the estimate's error of the tile's greatest: nearly always one token.
The result is the exact one. The sums of exp(temperature x (score - best)), which say how certain a
draft is, are made of the estimates (without noise: of exp(logit - best)).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.best_token import TileMaxima, id_or_marker_ref, launch_write
from specdec.kernels.cut_ids import CutIds, first_id, tile_columns_of
from specdec.kernels.gumbel import (
    gumbel_estimate,
    gumbel_noise,
    gumbel_of_all_ref,
    gumbel_ref,
    philox,
)
from specdec.kernels.overlap import begin


class NoiseKeys(NamedTuple):
    """What the noise of T rows' tokens is drawn from. Rows of padding have temperature 0."""

    temperatures: Tensor  # [T] float32, 0 = greedy
    seeds: Tensor  # [T, 2] low and high 32 bits
    positions: Tensor  # [T] of the drawn tokens
    epochs: Tensor  # [T] the last word of the counter
    stream: int
    token_ids: Tensor | None = None  # [W] target ids of the whole vocabulary, None: their numbers

    def rows(self, first: int, end: int) -> "NoiseKeys":
        return self._rows(slice(first, end))

    def every(self, step: int) -> "NoiseKeys":
        """Keep the first of every `step` rows."""
        return self._rows(slice(None, None, step))

    def _rows(self, which: slice) -> "NoiseKeys":
        temperatures, seeds, positions, epochs = (each[which] for each in self[:4])
        return NoiseKeys(temperatures, seeds, positions, epochs, self.stream, self.token_ids)


def choose_token(
    logits_TV: Tensor,
    floor_T: Tensor,
    noise_keys: NoiseKeys,
    out_T: Tensor,
    cut: CutIds | None = None,
) -> None:
    """Write the chosen id of every row to out_T (int64, may be strided).

    floor_T: least logit / temperature
    cut: the ids of the columns, where others have the rest
    """
    if use_triton(logits_TV):
        choices = launch_choices(logits_TV, floor_T, noise_keys, cut=cut)
        launch_write(choices.best, choices.ids, out_T, cut)
    else:
        out_T.copy_(choose_token_ref(logits_TV, floor_T, noise_keys, cut))


def launch_choices(
    logits_TV: Tensor,
    floor_T: Tensor,
    noise_keys: NoiseKeys,
    has_sums: bool = False,
    cut: CutIds | None = None,
) -> TileMaxima:
    """Find the best of each tile of columns."""
    T, V = logits_TV.shape
    block = tile_columns_of(logits_TV, cut)
    tiles = -(-V // block)
    best = torch.empty(tiles, T, dtype=torch.float32, device=logits_TV.device)
    ids = torch.empty(tiles, T, dtype=torch.int32, device=logits_TV.device)
    sums = torch.empty_like(best) if has_sums else best
    token_ids = ids if noise_keys.token_ids is None else noise_keys.token_ids
    flags = {"STREAM": noise_keys.stream, "HAS_IDS": noise_keys.token_ids is not None}
    flags |= {"HAS_SUMS": has_sums, "BLOCK": block, "IS_GPU": logits_TV.is_cuda}
    options = {"num_warps": 4, "enable_fp_fusion": False} | launch_options(logits_TV)
    tensors = (best, ids, sums, logits_TV, floor_T, *noise_keys[:4], token_ids)
    sizes = logits_TV.stride(0), T, V, first_id(cut)
    _choose_kernel[(tiles, T)](*tensors, *sizes, **flags, **options)
    return TileMaxima(best, ids, sums if has_sums else None)


@jit(varying=("temperature_ptr", "seeds_ptr", "positions_ptr", "epochs_ptr", "T"))
def _choose_kernel(
    best_ptr,  # [tiles, T] float32
    ids_ptr,  # [tiles, T] int32
    sums_ptr,  # [tiles, T] float32, with HAS_SUMS
    logits_ptr,  # [T, V] float32
    floor_ptr,  # [T] float32
    temperature_ptr,  # [T] float32
    seeds_ptr,  # [T, 2]
    positions_ptr,  # [T]
    epochs_ptr,  # [T]
    token_ids_ptr,  # [W]
    stride_logits,
    T,
    V,
    first,  # id of the first column
    STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    t = tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    floor = tl.load(floor_ptr + t)
    start = first + tile * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < first + V
    row_ptr = logits_ptr + t.to(tl.int64) * stride_logits - first
    x = tl.load(row_ptr + column, mask=inside, other=float("-inf"))
    top = tl.max(tl.where(x == x, x, float("inf")), axis=0)
    id = start
    total = 0.0
    if (temperature > 0.0) & (tl.abs(top) < float("inf")):
        scaled = x
        if temperature != 1.0:
            scaled = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature)
        if floor > float("-inf"):
            scaled = tl.where(scaled >= floor, scaled, float("-inf"))
            top = tl.max(scaled, axis=0)
        if top > float("-inf"):
            keys = (seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr)
            r = _draws(keys, start, t, column, inside, STREAM, HAS_IDS)
            guess = scaled + gumbel_estimate(r, IS_GPU)
            most = tl.max(guess, axis=0)
            if HAS_SUMS:
                total = tl.sum(tl.exp(temperature * (guess - most)), axis=0)
            # twice what an estimate and the sum's rounding may be off
            is_near = guess >= most - (5e-4 + (tl.abs(most) + 32.0) * 9.5367431640625e-07)
            id = tl.min(tl.where(is_near, column, 1 << 30), axis=0)
            if tl.sum(is_near.to(tl.int32), axis=0) == 1:
                only = tl.sum(tl.where(is_near, r, 0).to(tl.int32), axis=0).to(tl.uint32)
                top = tl.sum(tl.where(is_near, scaled, 0.0), axis=0) + gumbel_noise(only)
            else:
                score = tl.where(is_near, scaled + gumbel_noise(r), float("-inf"))
                top = tl.max(score, axis=0)
                id = tl.min(tl.where(score == top, column, 1 << 30), axis=0)
    else:
        # of a row that is not finite, any will do
        id = tl.min(tl.where(x == top, column, 1 << 30), axis=0)
        if HAS_SUMS:
            total = tl.sum(tl.exp(x - top), axis=0)
    tl.store(best_ptr + tile * T + t, top)
    tl.store(ids_ptr + tile * T + t, id)
    if HAS_SUMS:
        tl.store(sums_ptr + tile * T + t, total)


@jit
def _draws(keys, start, t, column, inside, STREAM: tl.constexpr, HAS_IDS: tl.constexpr):
    """Draw 32 random bits for each column's token. start: the first column, a multiple of 4."""
    seeds_ptr, positions_ptr, epochs_ptr, token_ids_ptr = keys
    BLOCK: tl.constexpr = column.shape[0]
    WORDS: tl.constexpr = BLOCK if HAS_IDS else BLOCK // 4
    zero = tl.zeros((WORDS,), tl.uint32)
    k0 = zero + tl.load(seeds_ptr + t * 2).to(tl.uint32)
    k1 = zero + tl.load(seeds_ptr + t * 2 + 1).to(tl.uint32)
    b = zero + tl.load(positions_ptr + t).to(tl.uint32)
    d = zero + tl.load(epochs_ptr + t).to(tl.uint32)
    if HAS_IDS:
        token = tl.load(token_ids_ptr + column, mask=inside, other=0)
        r0, r1, r2, r3 = philox(k0, k1, (token >> 2).to(tl.uint32), b, zero + STREAM, d)
        lane = token & 3
        r = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
    else:
        # four neighbours share a block of Philox
        block = (start // 4 + tl.arange(0, WORDS)).to(tl.uint32)
        r0, r1, r2, r3 = philox(k0, k1, block, b, zero + STREAM, d)
        r = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK,))
    return r


def choose_token_ref(
    logits_TV: Tensor, floor_T: Tensor, noise_keys: NoiseKeys, cut: CutIds | None = None
) -> Tensor:
    return id_or_marker_ref(noisy_ref(logits_TV, floor_T, noise_keys, cut), cut)


def noisy_ref(
    logits_TV: Tensor, floor_T: Tensor, noise_keys: NoiseKeys, cut: CutIds | None = None
) -> Tensor:
    """Compute the scores [T, V], -inf below the floor."""
    noise_TV = noise_ref(noise_keys, logits_TV.shape[1], first_id(cut))
    is_greedy_T1 = (noise_keys.temperatures == 0)[:, None]
    divisor_T1 = torch.where(is_greedy_T1, 1, noise_keys.temperatures[:, None])
    scaled_TV = logits_TV / divisor_T1
    is_out_TV = (scaled_TV < floor_T[:, None]) & ~is_greedy_T1
    noisy_TV = scaled_TV + noise_TV.masked_fill(is_greedy_T1, 0)
    return torch.where(is_out_TV, -torch.inf, noisy_TV)


def noise_ref(noise_keys: NoiseKeys, num_columns: int, first: int = 0) -> Tensor:
    """Compute the noise [T, V] of the columns' tokens from `first` on, of greedy rows too."""
    where = (noise_keys.seeds, noise_keys.positions)
    which = (noise_keys.stream, noise_keys.epochs)
    if noise_keys.token_ids is None:
        return gumbel_of_all_ref(*where, num_columns, *which, first)
    token_ids = noise_keys.token_ids[first : first + num_columns]
    return gumbel_ref(*where, token_ids[None], *which)
