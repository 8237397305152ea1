"""The floor of rows whose columns lie on several ranks: the same whole numbers, added over ranks.

Ranks exchange the top of each row; then what lies in each bin, so that all gather the keys of the
same bins, each its own; then, pass by pass, how many tokens or how much mass of theirs reach each
of REACHES keys between which the floor lies. The sums say, as in search.py, between which two of
them to go on: four passes find any of 2^32 keys. First that of min-p and top-k, from counts. Then
one exchange of the mass at or above it, which top-p is a share of. Last that of top-p, from masses.

A rank reads the row where search.py would; it matters to nobody else, since both ways reach the
same. Only whether the bins of a mass were wrong is decided by all.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl
from specdec.kernels.cut_ids import CutIds, greatest_over_ids, tile_columns_of
from specdec.kernels.overlap import begin
from specdec.kernels.support_floor import units
from specdec.kernels.support_floor.bins import count_kernel, gather_kernel, top_kernel
from specdec.kernels.support_floor.search import bounds, counts_from, masses_from
from specdec.kernels.support_floor.twin import Limits, has_limit_ref, masses_ref, scaled_ref
from specdec.kernels.support_floor.units import NUM_BINS

REACHES = 256  # keys of a pass
PASSES = 4  # find one of 2^32
BLOCK = 32  # keys that are compared with them at a time
START, COUNTS, SHARES, MASSES, END = range(5)  # what ranks exchange, in this order
STAGES = (START, *[COUNTS] * PASSES, SHARES, *[MASSES] * PASSES, END)
LEAST_KEY = -(2**31)


def launch_floor_of_ranks(logits_TV: Tensor, limits: Limits, num_keys: int, cut: CutIds) -> Tensor:
    """Find the floor [T], as `launch_support_floor` does of whole rows."""
    T, V = logits_TV.shape
    block = tile_columns_of(logits_TV, cut)
    tiles = -(-V // block)
    num_keys = min(num_keys, V)
    new = logits_TV.new_empty
    tops = new(T, tiles + 1)  # of the tiles; of the row, on all ranks
    bins, places = new(T, NUM_BINS, dtype=torch.int32), new(T, 3, dtype=torch.int32)
    keys, masses = new(T, 2, num_keys, dtype=torch.int32), new(T, 2, dtype=torch.int64)
    rows = (logits_TV, *limits, logits_TV.stride(0), V, tiles + 1)
    options = {"num_warps": 8, "enable_fp_fusion": False} | launch_options(logits_TV)
    sizes = {"TILES": next_power_of_2(tiles + 1), "NUM_BINS": NUM_BINS}
    top_kernel[(tiles, T)](
        tops, bins, masses, places, *rows, NUM_BINS=NUM_BINS, BLOCK=block, **options
    )
    tops[:, tiles] = cut.greatest(tops[:, :tiles].amax(dim=1))
    count_kernel[(tiles, T)](bins, masses, tops, *rows, **sizes, BLOCK=block, **options)
    counted = torch.cat([bins.long(), masses[:, :1]], dim=1)
    sums = cut.exchange.gather(counted).sum(dim=0)
    bins_of_all = sums[:, :NUM_BINS].int()
    masses[:, 0] = sums[:, NUM_BINS]
    found = keys, places, masses
    gather_kernel[(tiles, T)](
        *(*found, bins_of_all, tops, *rows, num_keys, cut.vocab_size),
        **sizes,
        BLOCK=block,
        **options,
    )
    floor_T, state = new(T), new(T, 5, dtype=torch.int64)
    out = new(T, REACHES, dtype=torch.int64)
    reached = out[None]
    for taken, given in pairwise(STAGES):
        _reach_kernel[(T,)](
            *(out, floor_T, state, reached, *found, bins, tops, *rows),
            *(num_keys, cut.vocab_size, cut.shard.size),
            **sizes,
            TAKEN=taken,
            GIVEN=given,
            REACHES=REACHES,
            BLOCK=BLOCK,
            **options,
        )
        if given != END:
            reached = cut.exchange.gather(out)
    return floor_T


@jit(varying=("temperature_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr"))
def _reach_kernel(
    out_ptr,  # [T, REACHES] int64: counts or masses of this rank
    floor_ptr,  # [T] float32, at the END
    state_ptr,  # [T, 5] int64: low, high, lowest, kept, is_outside
    reached_ptr,  # [n, T, REACHES] int64: what all ranks gave before
    keys_ptr,  # [T, 2, num_keys] int32
    places_ptr,  # [T, 3] int32
    masses_ptr,  # [T, 2] int64: of the row, on all ranks; of this rank's bins before the first
    bins_ptr,  # [T, NUM_BINS] int32, of this rank
    tops_ptr,  # [T, tiles] float32, the last of the row
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
    n,
    TAKEN: tl.constexpr,
    GIVEN: tl.constexpr,
    TILES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    REACHES: tl.constexpr,
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
            top_k = tl.minimum(tl.load(top_k_ptr + t), num_ids)
            top_p = tl.load(top_p_ptr + t)
            has_cut = (top_k > 0) | (log_min_p > float("-inf"))
            is_far = (last == NUM_BINS - 1) & has_cut
            least, greatest = bounds(is_far, first, last, top, NUM_BINS)
            i = tl.arange(0, REACHES)
            own_ptr = state_ptr + t * 5
            low, high, lowest = least, greatest, units.least_key()
            kept, is_outside = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
            if TAKEN == 0:
                if top_k == 0:
                    high = low
            else:
                low, high = tl.load(own_ptr), tl.load(own_ptr + 1)
                lowest, kept = tl.load(own_ptr + 2), tl.load(own_ptr + 3)
                is_outside = tl.load(own_ptr + 4)
                reached = tl.zeros((REACHES,), tl.int64)
                for rank in range(n):
                    reached += tl.load(reached_ptr + (rank * tl.num_programs(0) + t) * REACHES + i)
                if TAKEN == 1:
                    low, high = _narrowed(low, high, reached >= top_k, REACHES)
                elif TAKEN == 2:
                    kept = tl.load(masses_ptr + t * 2)
                    if has_cut:
                        kept = _nth(reached, 0, REACHES)
                    limit = top_p.to(tl.float64) * kept.to(tl.float64)
                    is_above = _nth(reached, 1, REACHES).to(tl.float64) >= limit
                    is_below = _nth(reached, 2, REACHES).to(tl.float64) < limit
                    # the limit lies below the gathered keys, or above them
                    is_outside = (is_above | (is_below & (has_cut == 0))).to(tl.int64)
                    low, high = tl.maximum(least, lowest), greatest
                    if is_outside != 0:
                        low, high = lowest, units.key_of(top).to(tl.int64)
                    high = tl.maximum(tl.where(top_p < 1.0, high, low), low)
                else:
                    limit = top_p.to(tl.float64) * kept.to(tl.float64)
                    low, high = _narrowed(low, high, reached.to(tl.float64) >= limit, REACHES)
            is_whole = (num > num_keys) | is_far | (is_outside != 0)
            size = tl.where(is_whole, V, num)
            row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
            row_keys_ptr = keys_ptr + t.to(tl.int64) * 2 * num_keys
            source = (is_whole, size, row_ptr, temperature, row_keys_ptr, num_keys)
            before = tl.load(masses_ptr + t * 2 + 1)
            step = (high - low) // REACHES + 1
            ends = tl.minimum(low + step * (i + 1), high + 1)
            if GIVEN == 1:
                b = tl.arange(0, NUM_BINS)
                counts = tl.load(bins_ptr + t * NUM_BINS + b)
                above = tl.where(is_whole, 0, tl.sum(tl.where(b < first, counts, 0), axis=0))
                counts = above + counts_from(source, ends.to(tl.int32), REACHES, BLOCK)
                tl.store(out_ptr + t * REACHES + i, counts.to(tl.int64))
            elif GIVEN == 2:
                if top_k > 0:
                    lowest = low
                if log_min_p > float("-inf"):
                    lowest = tl.maximum(lowest, units.key_of(top + log_min_p).to(tl.int64))
                asked = tl.where(i == 0, lowest, least + 1).to(tl.int32)
                masses = masses_from(source, asked, top, REACHES, BLOCK)
                masses += tl.where(is_whole, 0, before)
                tl.store(out_ptr + t * REACHES + i, tl.where(i == 1, before, masses))
            elif GIVEN == 3:
                masses = masses_from(source, ends.to(tl.int32), top, REACHES, BLOCK)
                tl.store(out_ptr + t * REACHES + i, tl.where(is_whole, 0, before) + masses)
            else:
                floor = units.value_of(tl.maximum(low, lowest).to(tl.int32))
            tl.debug_barrier()  # every warp has read the state
            tl.store(own_ptr, low)
            tl.store(own_ptr + 1, high)
            tl.store(own_ptr + 2, lowest)
            tl.store(own_ptr + 3, kept)
            tl.store(own_ptr + 4, is_outside)
    if GIVEN == 4:
        tl.store(floor_ptr + t, floor)


@jit
def _narrowed(low, high, is_reached, REACHES: tl.constexpr):
    """Go on in the part after the last key that is reached; all before it are, too."""
    step = (high - low) // REACHES + 1
    num = tl.minimum(tl.sum(is_reached.to(tl.int32), axis=0), REACHES - 1)
    return tl.minimum(low + step * num, high), tl.minimum(low + step * (num + 1) - 1, high)


@jit
def _nth(values, n, SIZE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SIZE) == n, values, 0), axis=0)


def floor_of_ranks_ref(logits_TV: Tensor, limits: Limits, cut: CutIds) -> Tensor:
    """Search as the kernels do, in this rank's sorted row."""
    x_TV = scaled_ref(logits_TV, limits).sort(dim=-1).values
    top_T1 = greatest_over_ids(x_TV, cut)
    key_TV, top_key_T1 = _keys_ref(x_TV), _keys_ref(top_T1)
    up_to_TV = masses_ref(x_TV, top_T1).flip(1).cumsum(dim=1).flip(1)
    up_to_TV = torch.nn.functional.pad(up_to_TV, (0, 1))

    def counts(key_TF: Tensor) -> Tensor:
        reached_TF = key_TV.shape[1] - torch.searchsorted(key_TV, key_TF)
        return cut.exchange.gather(reached_TF).sum(dim=0)

    def masses(key_TF: Tensor) -> Tensor:
        reached_TF = up_to_TV.gather(1, torch.searchsorted(key_TV, key_TF))
        return cut.exchange.gather(reached_TF).sum(dim=0)

    k_T1 = limits.top_k.clamp(max=cut.vocab_size)[:, None]
    least_T1 = torch.full_like(top_key_T1, LEAST_KEY)
    lowest_T1 = _search_ref(counts, k_T1, least_T1, torch.where(k_T1 > 0, top_key_T1, least_T1))
    lowest_T1 = torch.maximum(lowest_T1, _keys_ref(top_T1 + limits.log_min_p[:, None]))
    limit_T1 = limits.top_p.double()[:, None] * masses(lowest_T1).double()
    high_T1 = torch.where(limits.top_p[:, None] < 1, top_key_T1, lowest_T1)
    key_T1 = _search_ref(masses, limit_T1, lowest_T1, torch.maximum(high_T1, lowest_T1))
    bits_T1 = torch.where(key_T1 < 0, key_T1 ^ 0x7FFFFFFF, key_T1).int()
    floor_T = bits_T1.view(torch.float32)[:, 0]
    return torch.where(has_limit_ref(limits) & (floor_T > -torch.inf), floor_T, -torch.inf)


def _keys_ref(x: Tensor) -> Tensor:
    """Map values to integers in their order, as units.py does."""
    bits = (x + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _search_ref(
    reach: Callable[[Tensor], Tensor], wanted_T1: Tensor, low_T1: Tensor, high_T1: Tensor
) -> Tensor:
    """Find the greatest key at which so much is reached, or `low`."""
    i_F = torch.arange(1, REACHES + 1, device=low_T1.device)
    for _ in range(PASSES):
        step_T1 = (high_T1 - low_T1) // REACHES + 1
        is_reached_TF = reach(torch.minimum(low_T1 + step_T1 * i_F, high_T1 + 1)) >= wanted_T1
        num_T1 = is_reached_TF.sum(dim=1, keepdim=True).clamp(max=REACHES - 1)
        end_T1 = torch.minimum(low_T1 + step_T1 * (num_T1 + 1) - 1, high_T1)
        low_T1, high_T1 = torch.minimum(low_T1 + step_T1 * num_T1, high_T1), end_T1
    return low_T1
