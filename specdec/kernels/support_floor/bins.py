"""The top of every tile, the tokens in each bin below it, and the keys where the floor must lie.

Tiles count their own tokens and add to the row's numbers. Only whole numbers are added, so their
order does not matter. The counts say exactly in which bin the k-th token lies. A share of the mass
ends within bounds: a token of a bin has at most the mass of its upper edge and at least that of its
lower one. Bounds that turn out wrong cost only time, since search.py notices. A tile whose tokens
are all equal, as in a flat tail, gives one key with a count.
"""

from specdec.kernels import jit, tl
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor import units


@jit(varying=("temperature_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr"))
def top_kernel(
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
    begin(PDL)
    tile = tl.program_id(0)
    t = tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if units.has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
        x = units.load_values(row_ptr, tile * BLOCK, V, temperature, BLOCK)
        tl.store(tops_ptr + t * tiles + tile, tl.max(x, axis=0))
        if tile == 0:
            tl.store(
                bins_ptr + t * NUM_BINS + tl.arange(0, NUM_BINS), tl.zeros((NUM_BINS,), tl.int32)
            )
            tl.store(masses_ptr + t * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
            i = tl.arange(0, 4)
            tl.store(places_ptr + t * 3 + i, tl.zeros((4,), tl.int32), mask=i < 3)


@jit(varying=("temperature_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr"))
def count_kernel(
    bins_ptr,  # [T, NUM_BINS] int32: tokens per bin, 0 in the last one
    masses_ptr,  # [T, 2] int64: of the row where it has a top_p; not this kernel's
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
    begin(PDL)
    tile = tl.program_id(0)
    t = tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if units.has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = units.row_top(tops_ptr + t * tiles, tiles, TILES)
        # what is further away lies in the last bin, which is not counted
        if tl.load(tops_ptr + t * tiles + tile) > top - 32.0:
            row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
            x = units.load_values(row_ptr, tile * BLOCK, V, temperature, BLOCK)
            if tl.load(top_p_ptr + t) < 1.0:
                tl.atomic_add(
                    masses_ptr + t * 2, tl.sum(units.mass_of(x, top), axis=0), sem="relaxed"
                )
            counts = tl.histogram(units.bin_at(top - x, NUM_BINS), NUM_BINS)
            i = tl.arange(0, NUM_BINS)
            is_counted = (counts > 0) & (i < NUM_BINS - 1)
            tl.atomic_add(bins_ptr + t * NUM_BINS + i, counts, mask=is_counted, sem="relaxed")


@jit(varying=("temperature_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr"))
def gather_kernel(
    keys_ptr,  # [T, 2, num_keys] int32: keys in any order, and how often each occurs
    places_ptr,  # [T, 3] int32: keys (num_keys at most are written), first bin, last bin
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
    num_ids,  # of all ranks
    TILES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    t = tl.program_id(1)
    temperature = tl.load(temperature_ptr + t)
    if units.has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = units.row_top(tops_ptr + t * tiles, tiles, TILES)
        tile_top = tl.load(tops_ptr + t * tiles + tile)
        # the first tile says where to search, even if it holds no token
        if (top > float("-inf")) & ((tile == 0) | (tile_top > top - 32.0)):
            top_k = tl.minimum(tl.load(top_k_ptr + t), num_ids).to(tl.int32)
            top_p = tl.load(top_p_ptr + t)
            mass = tl.load(masses_ptr + t * 2)
            log_min_p = tl.load(log_min_p_ptr + t)
            row_bins_ptr = bins_ptr + t * NUM_BINS
            first, last = _bins_of_floor(row_bins_ptr, mass, log_min_p, top_k, top_p, NUM_BINS)
            if tile == 0:
                tl.store(places_ptr + t * 3 + 1, first)
                tl.store(places_ptr + t * 3 + 2, last)
            nearest = units.bin_at(top - tile_top, NUM_BINS)
            if nearest <= last:
                row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
                x = units.load_values(row_ptr, tile * BLOCK, V, temperature, BLOCK)
                bin = units.bin_at(top - x, NUM_BINS)
                if (nearest < first) & (top_p < 1.0):
                    before = tl.sum(tl.where(bin < first, units.mass_of(x, top), 0), axis=0)
                    tl.atomic_add(masses_ptr + t * 2 + 1, before, sem="relaxed")
                is_in = (bin >= first) & (bin <= last) & (x > float("-inf"))
                row_keys_ptr = keys_ptr + t.to(tl.int64) * 2 * num_keys
                _store_keys(
                    row_keys_ptr, places_ptr + t * 3, units.key_of(x), is_in, num_keys, BLOCK
                )


@jit
def _bins_of_floor(bins_ptr, mass, log_min_p, top_k, top_p, NUM_BINS: tl.constexpr):
    """Find the first and the last bin in which the last kept token may lie."""
    i = tl.arange(0, NUM_BINS)
    counts = tl.load(bins_ptr + i)
    # the bin where min-p or top-k end; the last one where neither does
    cut = tl.full((), NUM_BINS - 1, tl.int32)
    if top_k > 0:
        cut = tl.minimum(cut, tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0))
    if log_min_p > float("-inf"):
        cut = tl.minimum(cut, units.bin_at(-log_min_p, NUM_BINS) + 1)
    first = cut
    last = cut
    if top_p < 1.0:
        # the mass up to each bin lies between these; bounds have some room for rounding
        most = tl.cumsum(counts.to(tl.float32) * tl.exp(-units.edge_of(i)), axis=0) * 1.001
        least = tl.cumsum(counts.to(tl.float32) * tl.exp(-units.edge_of(i + 1)), axis=0) * 0.999
        total = mass.to(tl.float32) * 9.094947017729282e-13
        if (top_k > 0) | (log_min_p > float("-inf")):
            # of what they keep: at least all before the bin where they end
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
            ones = tl.full((BLOCK,), 1, tl.int32)
            tl.store(keys_ptr + at, key, mask=is_in & (at < num_keys))
            tl.store(keys_ptr + num_keys + at, ones, mask=is_in & (at < num_keys))
