"""One program per row looks for its floor among keys.

A search holds two keys between which the floor lies, counts for PIVOTS keys between them how many
tokens, or how much mass, lie at or above each, and goes on between two of these, until one is left.

It counts the gathered keys. It counts the whole row where more keys were found than there is room
for, where min-p or top-k may end in the last bin, which was not counted, and again where the bounds
of the mass were wrong. Where the keys come from is passed on as one tuple, `source`: (is it the
whole row, its columns or keys, the row, its temperature, the gathered keys, the room for them).
"""

from specdec.kernels import jit, tl
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor import units


@jit(varying=("temperature_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr"))
def search_kernel(
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
    begin(PDL)
    t = tl.program_id(0)
    temperature = tl.load(temperature_ptr + t)
    floor = float("-inf")
    if units.has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = units.row_top(tops_ptr + t * tiles, tiles, TILES)
        if top > float("-inf"):
            num = tl.load(places_ptr + t * 3)
            first = tl.load(places_ptr + t * 3 + 1)
            last = tl.load(places_ptr + t * 3 + 2)
            log_min_p = tl.load(log_min_p_ptr + t)
            top_p = tl.load(top_p_ptr + t)
            # V and more keep all
            top_k = tl.minimum(tl.load(top_k_ptr + t), V).to(tl.int32)
            has_cut = (top_k > 0) | (log_min_p > float("-inf"))
            is_whole = (num > num_keys) | ((last == NUM_BINS - 1) & has_cut)
            row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
            keys_ptr = keys_ptr + t.to(tl.int64) * 2 * num_keys
            size = tl.where(is_whole, V, num)
            source = (is_whole, size, row_ptr, temperature, keys_ptr, num_keys)
            low, high = bounds(is_whole, first, last, top, NUM_BINS)
            lowest = units.least_key()
            if log_min_p > float("-inf"):
                lowest = units.key_of(top + log_min_p).to(tl.int64)
            if top_k > 0:
                # tokens in the bins before the first one that was gathered
                i = tl.arange(0, NUM_BINS)
                counts = tl.load(bins_ptr + t * NUM_BINS + i)
                above = tl.where(is_whole, 0, tl.sum(tl.where(i < first, counts, 0), axis=0))
                key = _kth_key(source, low, high, top_k, above, PIVOTS, BLOCK)
                lowest = tl.maximum(lowest, key)
            if top_p < 1.0:
                kept = tl.load(masses_ptr + t * 2)
                before = tl.where(is_whole, 0, tl.load(masses_ptr + t * 2 + 1))
                if has_cut:
                    kept = before + _mass_from(source, lowest, top, PIVOTS, BLOCK)
                limit = top_p.to(tl.float64) * kept.to(tl.float64)
                low = tl.maximum(low, lowest)
                key = _key_of_mass(source, low, high, limit, before, top, PIVOTS, BLOCK)
                # the search ran to an edge: the limit lies below the gathered keys, or above them
                is_outside = (before.to(tl.float64) >= limit) | ((key == low) & (has_cut == 0))
                if is_outside & (is_whole == 0):
                    row = (is_outside, V, row_ptr, temperature, keys_ptr, num_keys)
                    nothing = tl.full((), 0, tl.int64)
                    high = units.key_of(top).to(tl.int64)
                    key = _key_of_mass(row, lowest, high, limit, nothing, top, PIVOTS, BLOCK)
                lowest = tl.maximum(lowest, key)
            floor = units.value_of(lowest.to(tl.int32))
    tl.store(floor_ptr + t, floor)


@jit
def bounds(is_whole, first, last, top, NUM_BINS: tl.constexpr):
    """Find a key below and one above all that are searched."""
    low, high = units.least_key(), units.key_of(top).to(tl.int64)
    if is_whole == 0:
        # bins are rounded, so their edges leave some room
        high = tl.minimum(high, units.key_of(top - units.edge_of(first) + 0.0625).to(tl.int64))
        if last < NUM_BINS - 1:
            low = units.key_of(top - units.edge_of(last + 1) - 0.0625).to(tl.int64)
    return low, high


@jit
def _kth_key(source, low, high, top_k, above, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the greatest key that top_k tokens reach; `above` lie over all of the source."""
    while low < high:
        step = (high - low) // PIVOTS + 1
        pivots = tl.minimum(low + step * tl.arange(0, PIVOTS), high).to(tl.int32)
        counts = above + counts_from(source, pivots, PIVOTS, BLOCK)
        # all reach the first pivot
        last = tl.max(tl.where(counts >= top_k, tl.arange(0, PIVOTS), 0), axis=0)
        low = tl.minimum(low + step * last, high)
        high = tl.minimum(low + step - 1, high)
    return low


@jit
def _key_of_mass(source, low, high, limit, before, top, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the least key with less than the limit strictly above it, `before` included."""
    while low < high:
        step = (high - low) // PIVOTS + 1
        ends = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1) - 1, high)
        above = before + masses_from(source, (ends + 1).to(tl.int32), top, PIVOTS, BLOCK)
        fitting = tl.where(above.to(tl.float64) < limit, tl.arange(0, PIVOTS), PIVOTS - 1)
        at = tl.min(fitting, axis=0)
        high = tl.minimum(low + step * (at + 1) - 1, high)
        low = tl.minimum(low + step * at, high)
    return low


@jit
def _mass_from(source, key, top, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    pivots = tl.zeros((PIVOTS,), tl.int32) + key.to(tl.int32)
    return tl.max(masses_from(source, pivots, top, PIVOTS, BLOCK), axis=0)


@jit
def counts_from(source, pivots, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Count, for each pivot, the tokens whose key is at least it."""
    counts = tl.zeros((PIVOTS,), tl.int32)
    for start in range(0, source[1], BLOCK):
        key, count = _load_keys(source, start, BLOCK)
        counts += tl.sum(tl.where(key[None, :] >= pivots[:, None], count[None, :], 0), axis=1)
    return counts


@jit
def masses_from(source, pivots, top, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, for each pivot, the mass of the tokens whose key is at least it."""
    masses = tl.zeros((PIVOTS,), tl.int64)
    for start in range(0, source[1], BLOCK):
        key, count = _load_keys(source, start, BLOCK)
        mass = units.mass_of(units.value_of(key), top) * count
        masses += tl.sum(tl.where(key[None, :] >= pivots[:, None], mass[None, :], 0), axis=1)
    return masses


@jit
def _load_keys(source, start, BLOCK: tl.constexpr):
    """Load BLOCK keys from `start`, and how many tokens have each; 0 after the end."""
    is_whole, n, row_ptr, temperature, keys_ptr, num_keys = source
    i = start + tl.arange(0, BLOCK)
    if is_whole:
        key = units.key_of(units.load_values(row_ptr, start, n, temperature, BLOCK))
        count = (i < n).to(tl.int32)
    else:
        key = tl.load(keys_ptr + i, mask=i < n, other=-2147483648)
        count = tl.load(keys_ptr + num_keys + i, mask=i < n, other=0)
    return key, count
