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
units.py says what keys, masses and bins are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import launch_options, next_power_of_2, pick
from specdec.kernels.support_floor.bins import count_kernel, gather_kernel, top_kernel
from specdec.kernels.support_floor.search import search_kernel
from specdec.kernels.support_floor.units import MASS, NUM_BINS

NUM_KEYS = 8192  # gathered per row at most
PIVOTS = 16  # each pass of the search leaves one of this many parts


class Limits(NamedTuple):
    """The limits of T rows."""

    temperatures: Tensor  # [T] float32; 0 = greedy: no limit
    log_min_p: Tensor  # [T] float32, -inf = off
    top_k: Tensor  # [T] int64, 0 = off
    top_p: Tensor  # [T] float32, 1 = off


def support_floor(logits_TV: Tensor, limits: Limits) -> Tensor:
    """Find the floor [T] float32, -inf where no limit is set."""
    return pick(logits_TV, launch_support_floor, support_floor_ref)(logits_TV, limits)


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
    gather_kernel[(tiles, T)](keys, places, masses, bins, tops, *rows, num_keys, **sizes, **options)
    sizes |= {"PIVOTS": PIVOTS, "BLOCK": 512}
    options["num_warps"] = 4
    search_kernel[(T,)](
        floor_T, keys, places, masses, bins, tops, *rows, num_keys, **sizes, **options
    )
    return floor_T


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
    has_limit_T = (limits.top_k > 0) | (limits.top_p < 1) | (limits.log_min_p > -torch.inf)
    return torch.where(has_limit_T & ~is_greedy_T1[:, 0], floor_T1[:, 0], -torch.inf)
