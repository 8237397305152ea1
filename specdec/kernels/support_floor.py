"""The least logit / temperature that min-p, top-k and top-p, in this order, leave in a row; -inf where none is set.

min_p keeps what has at least min_p times the greatest probability. top_k keeps the k-th greatest and all above it.
top_p keeps a token if those strictly above it, of what the first two kept, have less than top_p of the mass: equals
stay or go together, so no order decides. Masses are whole numbers (2^40 at the maximum): their sum has no order either.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs

MASS = 2.0**40
BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What T rows keep."""

    temperatures: Tensor  # [T] float32; 0 = greedy: no limit
    log_min_p: Tensor  # [T] float32, -inf = off
    top_k: Tensor  # [T] int64, 0 = off
    top_p: Tensor  # [T] float32, 1 = off


def support_floor(logits_TV: Tensor, limits: Limits) -> Tensor:
    """[T] float32."""
    return launch_support_floor(logits_TV, limits) if use_triton(logits_TV) else support_floor_ref(logits_TV, limits)


def launch_support_floor(logits_TV: Tensor, limits: Limits) -> Tensor:
    T, V = logits_TV.shape
    floor_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
    _support_floor_kernel[(T,)](
        floor_T,
        logits_TV,
        limits.temperatures,
        limits.log_min_p,
        limits.top_k,
        limits.top_p,
        logits_TV.stride(0),
        V,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
        **launch_options(logits_TV),
    )
    return floor_T


@jit
def _support_floor_kernel(
    floor_ptr,  # [T] float32
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0)
    row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
    temperature = tl.load(temperature_ptr + t)
    log_min_p, top_p = tl.load(log_min_p_ptr + t), tl.load(top_p_ptr + t)
    top_k = tl.load(top_k_ptr + t)
    floor = float("-inf")
    if (temperature > 0.0) & ((log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1.0)):
        top = float("-inf")
        for start in range(0, V, BLOCK):
            top = tl.maximum(top, tl.max(_scaled(row_ptr, start, V, temperature, BLOCK), axis=0))
        least = tl.full((), -2147483648, tl.int64)
        lowest = least  # by keys: integers in the order of the floats
        if log_min_p > float("-inf"):
            lowest = _key(top + log_min_p)
        if top_k > 0:
            low, high = least, _key(top)
            for _ in range(32):
                middle = low + (high - low + 1) // 2
                count = tl.full((), 0, tl.int64)
                for start in range(0, V, BLOCK):
                    x = _scaled(row_ptr, start, V, temperature, BLOCK)
                    is_in = (_key(x) >= middle) & (start + tl.arange(0, BLOCK) < V)
                    count += tl.sum(is_in.to(tl.int64), axis=0)
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle - 1)
            lowest = tl.maximum(lowest, low)
        if top_p < 1.0:
            total = _mass_from(row_ptr, lowest, top, temperature, V, BLOCK).to(tl.float64)
            low, high = lowest, _key(top)
            # the least key such that what lies strictly above it is less than top_p of the mass
            for _ in range(32):
                middle = low + (high - low) // 2
                above = _mass_from(row_ptr, middle + 1, top, temperature, V, BLOCK).to(tl.float64)
                is_kept = above < top_p.to(tl.float64) * total
                high = tl.where(is_kept, middle, high)
                low = tl.where(is_kept, low, tl.minimum(middle + 1, high))
            lowest = tl.maximum(lowest, high)
        bits = lowest.to(tl.int32)
        floor = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        floor = tl.where(lowest == least, float("-inf"), floor)
    tl.store(floor_ptr + t, floor)


@jit
def _scaled(row_ptr, start, V, temperature, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < V, other=float("-inf"))
    return tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature)


@jit
def _key(x):
    """Integers in the order of the floats; -0.0 becomes 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _mass_from(row_ptr, lowest, top, temperature, V, BLOCK: tl.constexpr):
    """Whole-numbered mass of the columns whose key is at least `lowest`."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, BLOCK):
        x = _scaled(row_ptr, start, V, temperature, BLOCK)
        is_in = (_key(x) >= lowest) & (start + tl.arange(0, BLOCK) < V)
        mass = (tl.exp(x - top) * 1099511627776.0).to(tl.int64)
        total += tl.sum(tl.where(is_in, mass, 0), axis=0)
    return total


def support_floor_ref(logits_TV: Tensor, limits: Limits) -> Tensor:
    is_greedy_T1 = (limits.temperatures == 0)[:, None]
    scaled_TV = logits_TV / torch.where(is_greedy_T1, 1, limits.temperatures[:, None])
    V = scaled_TV.shape[1]
    x_TV = scaled_TV.sort(dim=-1, descending=True).values
    top_T1 = x_TV[:, :1]
    k_T1 = torch.where(limits.top_k == 0, V, limits.top_k.clamp(max=V))[:, None]
    floor_T1 = torch.maximum(x_TV.gather(1, k_T1 - 1), top_T1 + limits.log_min_p[:, None])
    # -inf less -inf is no number: a row without tokens has no mass
    shifted_TV = torch.where(x_TV == -torch.inf, -torch.inf, x_TV - top_T1)
    mass_TV = torch.where(x_TV >= floor_T1, shifted_TV.double().exp() * MASS, 0).long()
    up_to_TV = mass_TV.cumsum(dim=-1)
    share_T1 = torch.where(limits.top_p >= 1, torch.inf, limits.top_p.double())[:, None]
    # of equals, the first decides for all: its share is the mass strictly above
    is_kept_TV = (up_to_TV - mass_TV).double() < share_T1 * up_to_TV[:, -1:].double()
    num_kept_T1 = is_kept_TV.sum(dim=-1, keepdim=True).clamp(min=1)
    floor_T1 = torch.maximum(floor_T1, x_TV.gather(1, num_kept_T1 - 1))
    has_limit_T1 = ((limits.top_k > 0) | (limits.top_p < 1) | (limits.log_min_p > -torch.inf))[:, None]
    return torch.where(has_limit_T1 & ~is_greedy_T1, floor_T1, -torch.inf)[:, 0]
