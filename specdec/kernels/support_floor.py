"""The least logit / temperature that min-p, top-k and top-p, in this order, leave in a row; -inf where none is set.

min_p keeps what has at least min_p times the greatest probability. top_k keeps the k-th greatest and all above it.
top_p keeps a token if those strictly above it, of what the first two kept, have less than top_p of the mass: equals
stay or go together, so no order decides. Masses are whole numbers (2^40 at the maximum): their sum has no order either.
What is not finite counts as masked.

Limits end near the top of a row. So one kernel finds the top of every tile, a second gathers the keys (integers in the
order of the floats) of what lies within WITHIN of the row's top and sums the masses of all else, and a third searches
these keys. Where they are too many, or the limit lies below them, the third reads the whole row instead, with the same
result: sums of integers do not depend on who adds what.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs

MASS = 2.0**40
WITHIN = 12.0  # of logit / temperature
NUM_KEYS = 8192  # gathered per row at most
PIVOTS = 16  # each pass of the search leaves one of so many parts


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


def launch_support_floor(logits_TV: Tensor, limits: Limits, num_keys: int = NUM_KEYS, within: float = WITHIN) -> Tensor:
    """num_keys, within: other values give the same floors."""
    T, V = logits_TV.shape
    block = 1024 if T <= 16 else 4096
    tiles, device = -(-V // block), logits_TV.device
    num_keys = min(num_keys, V)
    tops = torch.empty(T, tiles, dtype=torch.float32, device=device)
    keys = torch.empty(T, num_keys, dtype=torch.int32, device=device)
    counts = torch.empty(T, dtype=torch.int32, device=device)
    rest = torch.empty(T, dtype=torch.int64, device=device)
    floor_T = torch.empty(T, dtype=torch.float32, device=device)
    rows = (logits_TV, limits.temperatures, limits.log_min_p, limits.top_k, limits.top_p, logits_TV.stride(0), V, tiles)
    options = {"num_warps": 8, "enable_fp_fusion": False} | launch_options(logits_TV)
    padded = next_power_of_2(tiles)
    _top_kernel[(tiles, T)](tops, counts, rest, *rows, BLOCK=block, **options)
    _gather_kernel[(tiles, T)](
        keys, counts, rest, tops, *rows, num_keys, WITHIN=within, TILES=padded, BLOCK=block, **options
    )
    _search_kernel[(T,)](
        floor_T,
        keys,
        counts,
        rest,
        tops,
        *rows,
        num_keys,
        WITHIN=within,
        TILES=padded,
        PIVOTS=PIVOTS,
        BLOCK=512,
        **options,
    )
    return floor_T


@jit
def _top_kernel(
    tops_ptr,  # [T, tiles] float32
    counts_ptr,  # [T] int32
    rest_ptr,  # [T] int64
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    tiles,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    tile, t = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        x = _scaled(logits_ptr + t.to(tl.int64) * stride_logits, tile * BLOCK, V, temperature, BLOCK)
        tl.store(tops_ptr + t * tiles + tile, tl.max(x, axis=0))
        if tile == 0:
            tl.store(counts_ptr + t, 0)
            tl.store(rest_ptr + t, tl.full((), 0, tl.int64))


@jit
def _gather_kernel(
    keys_ptr,  # [T, num_keys] int32, in any order
    counts_ptr,  # [T] int32: keys within, of which the first num_keys are written
    rest_ptr,  # [T] int64: mass of all others
    tops_ptr,  # [T, tiles] float32
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    tiles,
    num_keys,
    WITHIN: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    tile, t = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = _row_top(tops_ptr + t * tiles, tiles, TILES)
        # below 2^-40 of the greatest there is no mass
        if tl.load(tops_ptr + t * tiles + tile) > top - 28.0:
            x = _scaled(logits_ptr + t.to(tl.int64) * stride_logits, tile * BLOCK, V, temperature, BLOCK)
            is_near = x >= top - WITHIN
            tl.atomic_add(rest_ptr + t, tl.sum(tl.where(is_near, 0, _mass(x, top)), axis=0), sem="relaxed")
            num_near = tl.sum(is_near.to(tl.int32), axis=0)
            if num_near > 0:
                first = tl.atomic_add(counts_ptr + t, num_near, sem="relaxed")
                at = first + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
                tl.store(keys_ptr + t.to(tl.int64) * num_keys + at, _key(x), mask=is_near & (at < num_keys))


@jit
def _search_kernel(
    floor_ptr,  # [T] float32
    keys_ptr,  # [T, num_keys] int32
    counts_ptr,  # [T] int32
    rest_ptr,  # [T] int64
    tops_ptr,  # [T, tiles] float32
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    tiles,
    num_keys,
    WITHIN: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0)
    temperature = tl.load(temperature_ptr + t)
    floor = float("-inf")
    if _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = _row_top(tops_ptr + t * tiles, tiles, TILES)
        if top > float("-inf"):
            row_ptr, keys_ptr = logits_ptr + t.to(tl.int64) * stride_logits, keys_ptr + t.to(tl.int64) * num_keys
            count, rest = tl.load(counts_ptr + t), tl.load(rest_ptr + t)
            log_min_p, top_p = tl.load(log_min_p_ptr + t), tl.load(top_p_ptr + t)
            # V and more keep all
            top_k = tl.minimum(tl.load(top_k_ptr + t), V).to(tl.int32)
            near, highest = _key(top - WITHIN).to(tl.int64), _key(top).to(tl.int64)
            lowest = tl.full((), -2147483648, tl.int64)
            if log_min_p > float("-inf"):
                lowest = _key(top + log_min_p).to(tl.int64)
            if top_k > 0:
                is_whole = (count > num_keys) | (count < top_k)
                low, high = tl.where(is_whole, -2147483648, near), highest
                n = tl.where(is_whole, V, count)
                while low < high:
                    step = (high - low) // PIVOTS + 1
                    pivots = tl.minimum(low + step * tl.arange(0, PIVOTS), high).to(tl.int32)
                    counts = tl.zeros((PIVOTS,), tl.int32)
                    for start in range(0, n, BLOCK):
                        key = _load_keys(is_whole, row_ptr, keys_ptr, start, n, temperature, BLOCK)
                        is_in = (key[None, :] >= pivots[:, None]) & (start + tl.arange(0, BLOCK) < n)[None, :]
                        counts += tl.sum(is_in.to(tl.int32), axis=1)
                    # the last pivot that top_k tokens reach; all reach the first
                    last = tl.max(tl.where(counts >= top_k, tl.arange(0, PIVOTS), 0), axis=0)
                    low = tl.minimum(low + step * last, high)
                    high = tl.minimum(low + step - 1, high)
                lowest = tl.maximum(lowest, low)
            if top_p < 1.0:
                # all that is kept is among the gathered ones, or all others are kept too
                is_cut = lowest >= near
                is_whole = (count > num_keys) | ((lowest > -2147483648) & (lowest < near))
                n = tl.where(is_whole, V, count)
                total = tl.zeros((PIVOTS,), tl.int64)
                pivots = tl.zeros((PIVOTS,), tl.int32) + lowest.to(tl.int32)
                for start in range(0, n, BLOCK):
                    key = _load_keys(is_whole, row_ptr, keys_ptr, start, n, temperature, BLOCK)
                    total += _masses_from(key, pivots, start, n, top, BLOCK)
                kept = tl.max(total, axis=0) + tl.where(is_whole | is_cut, 0, rest)
                limit = top_p.to(tl.float64) * kept.to(tl.float64)
                # a limit that the gathered ones do not reach lies below them
                is_below = (is_whole == 0) & (is_cut == 0) & ((kept - rest).to(tl.float64) < limit)
                is_whole = is_whole | is_below
                n = tl.where(is_whole, V, count)
                low, high = tl.where(is_whole, lowest, tl.maximum(lowest, near)), highest
                while low < high:
                    step = (high - low) // PIVOTS + 1
                    ends = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1) - 1, high)
                    above = tl.zeros((PIVOTS,), tl.int64)
                    for start in range(0, n, BLOCK):
                        key = _load_keys(is_whole, row_ptr, keys_ptr, start, n, temperature, BLOCK)
                        above += _masses_from(key, (ends + 1).to(tl.int32), start, n, top, BLOCK)
                    # the first end such that what lies strictly above it is less than top_p of the mass
                    is_kept = above.to(tl.float64) < limit
                    first = tl.min(tl.where(is_kept, tl.arange(0, PIVOTS), PIVOTS - 1), axis=0)
                    end = tl.minimum(low + step * (first + 1) - 1, high)
                    low = tl.minimum(low + step * first, end)
                    high = end
                lowest = tl.maximum(lowest, low)
            bits = lowest.to(tl.int32)
            floor = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            floor = tl.where(lowest == -2147483648, float("-inf"), floor)
    tl.store(floor_ptr + t, floor)


@jit
def _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
    has_min_p, has_top_k = tl.load(log_min_p_ptr + t) > float("-inf"), tl.load(top_k_ptr + t) > 0
    return (temperature > 0.0) & (has_min_p | has_top_k | (tl.load(top_p_ptr + t) < 1.0))


@jit
def _row_top(tops_ptr, tiles, TILES: tl.constexpr):
    i = tl.arange(0, TILES)
    return tl.max(tl.load(tops_ptr + i, mask=i < tiles, other=float("-inf")), axis=0)


@jit
def _scaled(row_ptr, start, V, temperature, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < V, other=float("-inf"))
    x = tl.where(x < float("inf"), x, float("-inf"))
    return tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature)


@jit
def _key(x):
    """Integers in the order of the floats; -0.0 becomes 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _mass(x, top):
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@jit
def _load_keys(is_whole, row_ptr, keys_ptr, start, n, temperature, BLOCK: tl.constexpr):
    """Keys start..start + BLOCK - 1 of the whole row, or of those that were gathered from it."""
    if is_whole:
        key = _key(_scaled(row_ptr, start, n, temperature, BLOCK))
    else:
        i = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + i, mask=i < n, other=-2147483648)
    return key


@jit
def _masses_from(key, pivots, start, n, top, BLOCK: tl.constexpr):
    """Of each pivot, the mass of the keys that are at least it."""
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    # what lies behind the end is no number as a float
    mass = tl.where(start + tl.arange(0, BLOCK) < n, _mass(tl.where(x > float("-inf"), x, float("-inf")), top), 0)
    return tl.sum(tl.where(key[None, :] >= pivots[:, None], mass[None, :], 0), axis=1)


def support_floor_ref(logits_TV: Tensor, limits: Limits) -> Tensor:
    is_greedy_T1 = (limits.temperatures == 0)[:, None]
    finite_TV = torch.where(logits_TV < torch.inf, logits_TV, -torch.inf)
    scaled_TV = finite_TV / torch.where(is_greedy_T1, 1, limits.temperatures[:, None])
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
