"""A token per row of float32 logits: the greatest score, and the lowest id among equals; -1 where no token is left.

score = logit / temperature + g for tokens at or above the row's floor (support_floor.py), with the noise g of gumbel.py
at the place of the drawn token. Temperature 0 is the case without noise and floor. The rows of the kernel leave a
maximum and an id per tile, as those of best_token do, so that the same readers follow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.best_token import lowest_best
from specdec.kernels.gumbel import gumbel_noise, gumbel_of_all_ref, gumbel_ref, philox
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs

BLOCK = 1024
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the tokens of T rows are drawn, and of whose noise. Rows of padding have temperature 0."""

    temperatures: Tensor  # [T] float32, 0 = greedy
    seeds: Tensor  # [T, 2] low and high 32 bits
    positions: Tensor  # [T] of the drawn tokens
    epochs: Tensor  # [T] the last word of the counter
    stream: int
    token_ids: Tensor | None = None  # [W] target ids of the columns, where they are not their numbers


def choose_token(logits_TV: Tensor, floor_T: Tensor, places: Places, out_T: Tensor) -> None:
    """Write the chosen column of every row to out_T (int64, may be strided). floor_T: least logit / temperature."""
    if use_triton(logits_TV):
        best, ids = launch_choices(logits_TV, floor_T, places)
        _write_kernel[(len(logits_TV),)](
            out_T,
            best,
            ids,
            out_T.stride(0),
            len(best),
            len(logits_TV),
            BLOCK=next_power_of_2(len(best)),
            num_warps=4,
            **launch_options(logits_TV),
        )
    else:
        out_T.copy_(choose_token_ref(logits_TV, floor_T, places))


def launch_choices(logits_TV: Tensor, floor_T: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """The greatest score of each tile of columns [tiles, T] float32 and its lowest column [tiles, T] int32."""
    T, V = logits_TV.shape
    tiles = -(-V // BLOCK)
    best = torch.empty(tiles, T, dtype=torch.float32, device=logits_TV.device)
    ids = torch.empty(tiles, T, dtype=torch.int32, device=logits_TV.device)
    _choose_kernel[(tiles, T)](
        best,
        ids,
        logits_TV,
        floor_T,
        places.temperatures,
        places.seeds,
        places.positions,
        places.epochs,
        ids if places.token_ids is None else places.token_ids,
        logits_TV.stride(0),
        T,
        V,
        STREAM=places.stream,
        HAS_IDS=places.token_ids is not None,
        QUARTER=BLOCK // 4,
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(logits_TV),
    )
    return best, ids


@jit
def _choose_kernel(
    best_ptr,  # [tiles, T] float32
    ids_ptr,  # [tiles, T] int32
    logits_ptr,  # [T, V] float32
    floor_ptr,  # [T] float32
    temperature_ptr,  # [T] float32
    seeds_ptr,  # [T, 2]
    positions_ptr,  # [T]
    epochs_ptr,  # [T]
    token_ids_ptr,  # [V]
    stride_logits,
    T,
    V,
    STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    QUARTER: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    tile, t = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    floor = tl.where(is_greedy, float("-inf"), tl.load(floor_ptr + t))
    zero = tl.zeros((QUARTER,), tl.uint32)
    k0 = zero + tl.load(seeds_ptr + t * 2).to(tl.uint32)
    k1 = zero + tl.load(seeds_ptr + t * 2 + 1).to(tl.uint32)
    b = zero + tl.load(positions_ptr + t).to(tl.uint32)
    d = zero + tl.load(epochs_ptr + t).to(tl.uint32)
    stream = zero + STREAM
    first = tile * QUARTER * 4 + tl.arange(0, QUARTER) * 4
    if not HAS_IDS:
        r0, r1, r2, r3 = philox(k0, k1, (first >> 2).to(tl.uint32), b, stream, d)
    best, lowest = tl.full((QUARTER,), float("-inf"), tl.float32), first
    for lane in tl.static_range(4):
        column = first + lane
        inside = column < V
        x = tl.load(logits_ptr + t.to(tl.int64) * stride_logits + column, mask=inside, other=float("-inf"))
        score = tl.div_rn(x, zero.to(tl.float32) + divisor)
        if HAS_IDS:
            token = tl.load(token_ids_ptr + column, mask=inside, other=0)
            r0, r1, r2, r3 = philox(k0, k1, (token >> 2).to(tl.uint32), b, stream, d)
            which = token & 3
            r = tl.where(which == 0, r0, tl.where(which == 1, r1, tl.where(which == 2, r2, r3)))
        elif lane == 0:
            r = r0
        elif lane == 1:
            r = r1
        elif lane == 2:
            r = r2
        else:
            r = r3
        noise = tl.where(is_greedy, 0.0, gumbel_noise(r))
        score = tl.where(inside & (score >= floor), score + noise, float("-inf"))
        lowest = tl.where(score > best, column, lowest)
        best = tl.maximum(best, score)
    top = tl.max(best, axis=0)
    id = tl.min(tl.where(best == top, lowest, 1 << 30), axis=0)
    tl.store(best_ptr + tile * T + t, top)
    tl.store(ids_ptr + tile * T + t, id)


@jit
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
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    top = tl.max(tl.load(best_ptr + i * T + t, mask=i < tiles, other=float("-inf")), axis=0)
    id = lowest_best(best_ptr, ids_ptr, t, tiles, T, BLOCK)
    tl.store(out_ptr + t * stride_out, tl.where(top == float("-inf"), -1, id).to(tl.int64))


def choose_token_ref(logits_TV: Tensor, floor_T: Tensor, places: Places) -> Tensor:
    is_greedy_T1 = (places.temperatures == 0)[:, None]
    divisor_T1 = torch.where(is_greedy_T1, 1, places.temperatures[:, None])
    scaled_TV = logits_TV / divisor_T1
    where = (places.seeds, places.positions)
    if places.token_ids is None:
        noise_TV = gumbel_of_all_ref(*where, logits_TV.shape[1], places.stream, places.epochs)
    else:
        noise_TV = gumbel_ref(*where, places.token_ids[None], places.stream, places.epochs)
    is_out_TV = (scaled_TV < floor_T[:, None]) & ~is_greedy_T1
    noisy_TV = torch.where(is_out_TV, -torch.inf, scaled_TV + noise_TV.masked_fill(is_greedy_T1, 0))
    best_T, id_T = noisy_TV.max(dim=-1)
    return torch.where(best_T == -torch.inf, NO_TOKEN, id_T)
