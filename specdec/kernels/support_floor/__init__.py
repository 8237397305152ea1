"""The least logit / temperature that min-p, top-k and top-p, in this order, leave in a row.

min_p keeps what has at least min_p times the greatest probability. top_k keeps the k-th greatest
and all above it. top_p keeps a token if those strictly above it, of what the first two kept, have
less than top_p of the mass: equals stay or go together, so their order does not matter. Masses are
whole numbers (2^40 at the maximum): their sum has no order either. What is not finite counts as
masked.

Sorting a row would read it many times over. Instead, in four launches:
1. the top of every tile (bins.py);
2. how many tokens lie in each of 128 bins below the row's top, and the row's mass (bins.py);
3. the few bins in which the floor must lie, and the keys of the tokens in them (bins.py);
4. a search among these keys, or in the whole row where they are too many (search.py), with the same
   result.
units.py says what keys, masses and bins are, ranks.py what they are for where rows are cut.
"""

import torch
from torch import Tensor

from specdec.kernels import launch_options, next_power_of_2, use_triton
from specdec.kernels.cut_ids import CutIds
from specdec.kernels.support_floor.bins import count_kernel, gather_kernel, top_kernel
from specdec.kernels.support_floor.ranks import floor_of_ranks_ref, launch_floor_of_ranks
from specdec.kernels.support_floor.search import search_kernel
from specdec.kernels.support_floor.twin import Limits, support_floor_ref
from specdec.kernels.support_floor.units import NUM_BINS

__all__ = ["Limits", "launch_support_floor", "support_floor", "support_floor_ref"]

NUM_KEYS = 8192  # gathered per row at most
PIVOTS = 16  # each pass of the search leaves one of this many parts


def support_floor(logits_TV: Tensor, limits: Limits, cut: CutIds | None = None) -> Tensor:
    """Find the floor [T] float32, -inf where no limit is set.

    cut: the ids of the columns, where others have the rest
    """
    if use_triton(logits_TV):
        if cut is None:
            return launch_support_floor(logits_TV, limits)
        return launch_floor_of_ranks(logits_TV, limits, NUM_KEYS, cut)
    if cut is None:
        return support_floor_ref(logits_TV, limits)
    return floor_of_ranks_ref(logits_TV, limits, cut)


def launch_support_floor(logits_TV: Tensor, limits: Limits, num_keys: int = NUM_KEYS) -> Tensor:
    """num_keys: any other number gives the same floors."""
    T, V = logits_TV.shape
    block = 1024 if T <= 16 else 2048
    tiles = -(-V // block)
    num_keys = min(num_keys, V)
    new = logits_TV.new_empty
    tops, floor_T = new(T, tiles), new(T)
    bins, places = new(T, NUM_BINS, dtype=torch.int32), new(T, 3, dtype=torch.int32)
    keys, masses = new(T, 2, num_keys, dtype=torch.int32), new(T, 2, dtype=torch.int64)
    rows = (logits_TV, *limits, logits_TV.stride(0), V, tiles)
    options = {"num_warps": 8, "enable_fp_fusion": False} | launch_options(logits_TV)
    sizes = {"TILES": next_power_of_2(tiles), "NUM_BINS": NUM_BINS, "BLOCK": block}
    top_kernel[(tiles, T)](
        tops, bins, masses, places, *rows, NUM_BINS=NUM_BINS, BLOCK=block, **options
    )
    count_kernel[(tiles, T)](bins, masses, tops, *rows, **sizes, **options)
    gather_kernel[(tiles, T)](
        keys, places, masses, bins, tops, *rows, num_keys, V, **sizes, **options
    )
    sizes |= {"PIVOTS": PIVOTS, "BLOCK": 512}
    options["num_warps"] = 4
    search_kernel[(T,)](
        floor_T, keys, places, masses, bins, tops, *rows, num_keys, **sizes, **options
    )
    return floor_T
