"""The top of every tile, then how many tokens lie in each bin below the row's top.

Tiles count their own tokens and add to the row's numbers. Only whole numbers are added, so their
order does not matter.
"""

from specdec.kernels import jit, tl
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor.units import bin_at, has_limit, load_values, mass_of, row_top


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
    if has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
        x = load_values(row_ptr, tile * BLOCK, V, temperature, BLOCK)
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
    if has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
        top = row_top(tops_ptr + t * tiles, tiles, TILES)
        # what is further away lies in the last bin, which is not counted
        if tl.load(tops_ptr + t * tiles + tile) > top - 32.0:
            row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
            x = load_values(row_ptr, tile * BLOCK, V, temperature, BLOCK)
            if tl.load(top_p_ptr + t) < 1.0:
                tl.atomic_add(masses_ptr + t * 2, tl.sum(mass_of(x, top), axis=0), sem="relaxed")
            counts = tl.histogram(bin_at(top - x, NUM_BINS), NUM_BINS)
            i = tl.arange(0, NUM_BINS)
            is_counted = (counts > 0) & (i < NUM_BINS - 1)
            tl.atomic_add(bins_ptr + t * NUM_BINS + i, counts, mask=is_counted, sem="relaxed")
