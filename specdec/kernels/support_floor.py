"""The least logit / temperature that min-p, top-k and top-p, in this order, leave in a row; -inf where none is set.

min_p keeps what has at least min_p times the greatest probability. top_k keeps the k-th greatest and all above it.
top_p keeps a token if those strictly above it, of what the first two kept, have less than top_p of the mass: equals
stay or go together, so no order decides. Masses are whole numbers (2^40 at the maximum): their sum has no order either.
What is not finite counts as masked.

Four kernels: the top of every tile; for each row how many tokens lie in each step below its top, and its whole
mass; from these the steps in which the limit must lie (a count tells them exactly, a mass within bounds), whose keys
(integers in the order of the floats) are gathered, equals of a tile as one; and a search among these. Where they are
too many, or a bound was wrong, the search reads the whole row instead, with the same result: sums of integers do not
depend on who adds what.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs

MASS = 2.0**40
NUM_BINS = 128  # steps below the top: 1/8 up to 12, then 5/8; the last one holds all that is further away
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


def launch_support_floor(logits_TV: Tensor, limits: Limits, num_keys: int = NUM_KEYS) -> Tensor:
    """num_keys: any other number gives the same floors."""
    T, V = logits_TV.shape
    block = 1024 if T <= 16 else 2048
    tiles, device = -(-V // block), logits_TV.device
    num_keys = min(num_keys, V)
    tops = torch.empty(T, tiles, dtype=torch.float32, device=device)
    bins = torch.empty(T, NUM_BINS, dtype=torch.int32, device=device)
    masses = torch.empty(T, 2, dtype=torch.int64, device=device)
    keys = torch.empty(T, 2, num_keys, dtype=torch.int32, device=device)
    places = torch.empty(T, 3, dtype=torch.int32, device=device)
    floor_T = torch.empty(T, dtype=torch.float32, device=device)
    rows = (logits_TV, limits.temperatures, limits.log_min_p, limits.top_k, limits.top_p, logits_TV.stride(0), V, tiles)
    options = {"num_warps": 8, "enable_fp_fusion": False} | launch_options(logits_TV)
    sizes = {"TILES": next_power_of_2(tiles), "NUM_BINS": NUM_BINS, "BLOCK": block}
    _top_kernel[(tiles, T)](tops, bins, masses, places, *rows, NUM_BINS=NUM_BINS, BLOCK=block, **options)
    _count_kernel[(tiles, T)](bins, masses, tops, *rows, **sizes, **options)
    _gather_kernel[(tiles, T)](keys, places, masses, bins, tops, *rows, num_keys, **sizes, **options)
    sizes |= {"PIVOTS": PIVOTS, "BLOCK": 512}
    options["num_warps"] = 4
    _search_kernel[(T,)](floor_T, keys, places, masses, bins, tops, *rows, num_keys, **sizes, **options)
    return floor_T


@jit
def _top_kernel(
    tops_ptr,  # [T, tiles] float32
    bins_ptr,  # [T, NUM_BINS] int32, made 0
    masses_ptr,  # [T, 2] int64, made 0
    places_ptr,  # [T, 3] int32, made 0
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    tiles,
    NUM_BINS: tl.constexpr,
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
            tl.store(bins_ptr + t * NUM_BINS + tl.arange(0, NUM_BINS), tl.zeros((NUM_BINS,), tl.int32))
            tl.store(masses_ptr + t * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
            tl.store(places_ptr + t * 3 + tl.arange(0, 4), tl.zeros((4,), tl.int32), mask=tl.arange(0, 4) < 3)


@jit
def _count_kernel(
    bins_ptr,  # [T, NUM_BINS] int32: tokens per bin; the last one may hold more than are counted
    masses_ptr,  # [T, 2] int64: of the row
    tops_ptr,  # [T, tiles] float32
    logits_ptr,  # [T, V] float32
    temperature_ptr,  # [T] float32
    log_min_p_ptr,  # [T] float32
    top_k_ptr,  # [T]
    top_p_ptr,  # [T] float32
    stride_logits,
    V,
    tiles,
    TILES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    tile, t = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = _row_top(tops_ptr + t * tiles, tiles, TILES)
        # what is further away lies in the last bin, which nobody counts
        if tl.load(tops_ptr + t * tiles + tile) > top - 32.0:
            x = _scaled(logits_ptr + t.to(tl.int64) * stride_logits, tile * BLOCK, V, temperature, BLOCK)
            if tl.load(top_p_ptr + t) < 1.0:
                tl.atomic_add(masses_ptr + t * 2, tl.sum(_mass(x, top), axis=0), sem="relaxed")
            counts = tl.histogram(_bin(x, top, NUM_BINS), NUM_BINS)
            i = tl.arange(0, NUM_BINS)
            tl.atomic_add(bins_ptr + t * NUM_BINS + i, counts, mask=(counts > 0) & (i < NUM_BINS - 1), sem="relaxed")


@jit
def _gather_kernel(
    keys_ptr,  # [T, 2, num_keys] int32: keys in any order, and how often each stands there
    places_ptr,  # [T, 3] int32: number of keys, of which num_keys are written; first and last bin of them
    masses_ptr,  # [T, 2] int64: of the row; of the bins before the first
    bins_ptr,  # [T, NUM_BINS] int32
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
    TILES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    tile, t = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if _has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = _row_top(tops_ptr + t * tiles, tiles, TILES)
        tile_top = tl.load(tops_ptr + t * tiles + tile)
        # the first tile says where to search, even if it holds no token
        if (top > float("-inf")) & ((tile == 0) | (tile_top > top - 32.0)):
            top_k, top_p = tl.minimum(tl.load(top_k_ptr + t), V).to(tl.int32), tl.load(top_p_ptr + t)
            first, last = _bins_of_limits(
                bins_ptr + t * NUM_BINS, tl.load(masses_ptr + t * 2), tl.load(log_min_p_ptr + t), top_k, top_p, NUM_BINS
            )
            if tile == 0:
                tl.store(places_ptr + t * 3 + 1, first)
                tl.store(places_ptr + t * 3 + 2, last)
            nearest = _bin(tile_top, top, NUM_BINS)
            if nearest <= last:
                x = _scaled(logits_ptr + t.to(tl.int64) * stride_logits, tile * BLOCK, V, temperature, BLOCK)
                bin = _bin(x, top, NUM_BINS)
                if (nearest < first) & (top_p < 1.0):
                    before = tl.sum(tl.where(bin < first, _mass(x, top), 0), axis=0)
                    tl.atomic_add(masses_ptr + t * 2 + 1, before, sem="relaxed")
                is_in = (bin >= first) & (bin <= last) & (x > float("-inf"))
                _store_keys(
                    keys_ptr + t.to(tl.int64) * 2 * num_keys, places_ptr + t * 3, _key(x), is_in, num_keys, BLOCK
                )


@jit
def _store_keys(keys_ptr, place_ptr, key, is_in, num_keys, BLOCK: tl.constexpr):
    """Append keys and their counts; where all are equal, one for all."""
    num = tl.sum(is_in.to(tl.int32), axis=0)
    if num > 0:
        highest = tl.max(tl.where(is_in, key, -2147483648), axis=0)
        if highest == tl.min(tl.where(is_in, key, 2147483647), axis=0):
            place = tl.atomic_add(place_ptr, 1, sem="relaxed")
            if place < num_keys:
                tl.store(keys_ptr + place, highest)
                tl.store(keys_ptr + num_keys + place, num)
        else:
            place = tl.atomic_add(place_ptr, num, sem="relaxed")
            at = place + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            tl.store(keys_ptr + at, key, mask=is_in & (at < num_keys))
            tl.store(keys_ptr + num_keys + at, tl.full((BLOCK,), 1, tl.int32), mask=is_in & (at < num_keys))


@jit
def _bins_of_limits(bins_ptr, mass, log_min_p, top_k, top_p, NUM_BINS: tl.constexpr):
    """The first and the last bin in which the last token may stand that is kept."""
    i = tl.arange(0, NUM_BINS)
    counts = tl.load(bins_ptr + i)
    # the bin where min-p or top-k end; the last one where neither does
    cut = tl.full((), NUM_BINS - 1, tl.int32)
    if top_k > 0:
        cut = tl.minimum(cut, tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0))
    if log_min_p > float("-inf"):
        cut = tl.minimum(cut, _step(-log_min_p, NUM_BINS) + 1)
    first, last = cut, cut
    if top_p < 1.0:
        # the mass up to each bin lies between these; bounds have some room for rounding
        most = tl.cumsum(counts.to(tl.float32) * tl.exp(-_edge(i)), axis=0) * 1.001
        least = tl.cumsum(counts.to(tl.float32) * tl.exp(-_edge(i + 1)), axis=0) * 0.999
        total = mass.to(tl.float32) * 9.094947017729282e-13
        if (top_k > 0) | (log_min_p > float("-inf")):
            total = tl.minimum(total, tl.max(tl.where(i < cut, least, 0.0), axis=0))
            first = tl.minimum(tl.sum((most < top_p * total).to(tl.int32), axis=0), cut)
        else:
            share, rest, slack = top_p * total, (1.0 - top_p) * total, 1e-5 * total
            is_early = (most < share) | ((tl.max(least, axis=0) - least) * 0.998 - slack > rest)
            is_short = (least < share) & (tl.max(most, axis=0) - most + slack > rest)
            first = tl.minimum(tl.sum(is_early.to(tl.int32), axis=0), cut)
            last = tl.minimum(tl.sum(is_short.to(tl.int32), axis=0), cut)
    return first, last


@jit
def _search_kernel(
    floor_ptr,  # [T] float32
    keys_ptr,  # [T, 2, num_keys] int32
    places_ptr,  # [T, 3] int32
    masses_ptr,  # [T, 2] int64
    bins_ptr,  # [T, NUM_BINS] int32
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
    TILES: tl.constexpr,
    NUM_BINS: tl.constexpr,
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
            row_ptr, keys_ptr = logits_ptr + t.to(tl.int64) * stride_logits, keys_ptr + t.to(tl.int64) * 2 * num_keys
            num, first = tl.load(places_ptr + t * 3), tl.load(places_ptr + t * 3 + 1)
            log_min_p, top_p = tl.load(log_min_p_ptr + t), tl.load(top_p_ptr + t)
            # V and more keep all
            top_k = tl.minimum(tl.load(top_k_ptr + t), V).to(tl.int32)
            i = tl.arange(0, NUM_BINS)
            above = tl.sum(tl.where(i < first, tl.load(bins_ptr + t * NUM_BINS + i), 0), axis=0)
            has_cut = (top_k > 0) | (log_min_p > float("-inf"))
            last = tl.load(places_ptr + t * 3 + 2)
            # the last bin is not counted
            is_whole = (num > num_keys) | ((last == NUM_BINS - 1) & has_cut)
            low, high = _edges(is_whole, first, last, top, NUM_BINS)
            lowest = tl.full((), -2147483648, tl.int64)
            if log_min_p > float("-inf"):
                lowest = _key(top + log_min_p).to(tl.int64)
            if top_k > 0:
                kth = _kth_key(
                    is_whole, row_ptr, keys_ptr, num, num_keys, V, temperature, low, high, top_k, above, PIVOTS, BLOCK
                )
                lowest = tl.maximum(lowest, kth)
            if top_p < 1.0:
                kept, before = tl.load(masses_ptr + t * 2), tl.load(masses_ptr + t * 2 + 1)
                before = tl.where(is_whole, 0, before)
                if has_cut:
                    cut = tl.zeros((PIVOTS,), tl.int32) + lowest.to(tl.int32)
                    kept = before + tl.max(
                        _masses(is_whole, row_ptr, keys_ptr, num, num_keys, V, temperature, cut, top, PIVOTS, BLOCK),
                        axis=0,
                    )
                limit = top_p.to(tl.float64) * kept.to(tl.float64)
                low = tl.maximum(low, lowest)
                key = _key_of_mass(
                    is_whole,
                    row_ptr,
                    keys_ptr,
                    num,
                    num_keys,
                    V,
                    temperature,
                    low,
                    high,
                    limit,
                    before,
                    top,
                    PIVOTS,
                    BLOCK,
                )
                # no gathered key stands at the lower edge: the limit lies below them, or above
                is_outside = (before.to(tl.float64) >= limit) | ((key == low) & (has_cut == 0))
                if is_outside & (is_whole == 0):
                    low = tl.maximum(lowest, -2147483648)
                    key = _key_of_mass(
                        is_outside,
                        row_ptr,
                        keys_ptr,
                        num,
                        num_keys,
                        V,
                        temperature,
                        low,
                        _key(top).to(tl.int64),
                        limit,
                        tl.full((), 0, tl.int64),
                        top,
                        PIVOTS,
                        BLOCK,
                    )
                lowest = tl.maximum(lowest, key)
            bits = lowest.to(tl.int32)
            floor = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            floor = tl.where(lowest == -2147483648, float("-inf"), floor)
    tl.store(floor_ptr + t, floor)


@jit
def _edges(is_whole, first, last, top, NUM_BINS: tl.constexpr):
    """A key below and one above all that are searched."""
    low, high = tl.full((), -2147483648, tl.int64), _key(top).to(tl.int64)
    if is_whole == 0:
        # steps are rounded, so the edges leave them some room
        high = tl.minimum(high, _key(top - _edge(first) + 0.0625).to(tl.int64))
        if last < NUM_BINS - 1:
            low = _key(top - _edge(last + 1) - 0.0625).to(tl.int64)
    return low, high


@jit
def _key_of_mass(
    is_whole,
    row_ptr,
    keys_ptr,
    num,
    num_keys,
    V,
    temperature,
    low,
    high,
    limit,
    before,
    top,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least key such that what lies strictly above it, `before` included, is less than the limit."""
    while low < high:
        step = (high - low) // PIVOTS + 1
        ends = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1) - 1, high)
        pivots = (ends + 1).to(tl.int32)
        above = before + _masses(is_whole, row_ptr, keys_ptr, num, num_keys, V, temperature, pivots, top, PIVOTS, BLOCK)
        at = tl.min(tl.where(above.to(tl.float64) < limit, tl.arange(0, PIVOTS), PIVOTS - 1), axis=0)
        high = tl.minimum(low + step * (at + 1) - 1, high)
        low = tl.minimum(low + step * at, high)
    return low


@jit
def _kth_key(
    is_whole,
    row_ptr,
    keys_ptr,
    num,
    num_keys,
    V,
    temperature,
    low,
    high,
    top_k,
    above,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest key that top_k tokens reach, of which `above` lie over all that are gathered."""
    n, above = tl.where(is_whole, V, num), tl.where(is_whole, 0, above)
    while low < high:
        step = (high - low) // PIVOTS + 1
        pivots = tl.minimum(low + step * tl.arange(0, PIVOTS), high).to(tl.int32)
        counts = tl.zeros((PIVOTS,), tl.int32) + above
        for start in range(0, n, BLOCK):
            key, count = _load_keys(is_whole, row_ptr, keys_ptr, start, n, num_keys, temperature, BLOCK)
            counts += tl.sum(tl.where(key[None, :] >= pivots[:, None], count[None, :], 0), axis=1)
        # all reach the first pivot
        last = tl.max(tl.where(counts >= top_k, tl.arange(0, PIVOTS), 0), axis=0)
        low = tl.minimum(low + step * last, high)
        high = tl.minimum(low + step - 1, high)
    return low


@jit
def _masses(
    is_whole,
    row_ptr,
    keys_ptr,
    num,
    num_keys,
    V,
    temperature,
    pivots,
    top,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each pivot, the mass of the keys that are at least it."""
    n = tl.where(is_whole, V, num)
    masses = tl.zeros((PIVOTS,), tl.int64)
    for start in range(0, n, BLOCK):
        key, count = _load_keys(is_whole, row_ptr, keys_ptr, start, n, num_keys, temperature, BLOCK)
        x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        # what lies behind the end is no number as a float
        mass = _mass(tl.where(x > float("-inf"), x, float("-inf")), top) * count
        masses += tl.sum(tl.where(key[None, :] >= pivots[:, None], mass[None, :], 0), axis=1)
    return masses


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
    if temperature != 1.0:
        x = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature)
    return x


@jit
def _key(x):
    """Integers in the order of the floats; -0.0 becomes 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _mass(x, top):
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@jit
def _bin(x, top, NUM_BINS: tl.constexpr):
    """The step of x below the top; the last one for all that is further away or nothing."""
    return _step(top - x, NUM_BINS)


@jit
def _step(distance, NUM_BINS: tl.constexpr):
    distance = tl.minimum(distance, 40.0)
    near, far = (distance * 8.0).to(tl.int32), 96 + ((distance - 12.0) * 1.6).to(tl.int32)
    return tl.minimum(tl.where(distance < 12.0, near, far), NUM_BINS - 1)


@jit
def _edge(step):
    """Where a step begins."""
    step = step.to(tl.float32)
    return tl.where(step < 96.0, step * 0.125, 12.0 + (step - 96.0) * 0.625)


@jit
def _load_keys(is_whole, row_ptr, keys_ptr, start, n, num_keys, temperature, BLOCK: tl.constexpr):
    """Keys and their counts, BLOCK from `start`: of the whole row, or of those that were gathered from it."""
    i = start + tl.arange(0, BLOCK)
    if is_whole:
        key = _key(_scaled(row_ptr, start, n, temperature, BLOCK))
        count = (i < n).to(tl.int32)
    else:
        key = tl.load(keys_ptr + i, mask=i < n, other=-2147483648)
        count = tl.load(keys_ptr + num_keys + i, mask=i < n, other=0)
    return key, count


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
