"""Pairs of row and slot, sorted by expert, and the tiles of rows that each expert has.

A pair is t * k + s. Pairs of one expert keep their order, so that places repeat too; pairs of
padding have no place. A tile is up to `block_m` places of one expert; there are no more than
`most_tiles`, which depends on the number of pairs alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Where pairs are, and what tiles cover them. Places after the last pair hold anything."""

    pair_P: Tensor  # [P] int32, the pair at each place
    tiles_M3: Tensor  # [M, 3] int32: expert, first place, place after the last; E: no tile


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Count the tiles that suffice: every expert has no more than one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block_m


def group_ref(ids_TS: Tensor, num_experts: int, block_m: int) -> Groups:
    ids_P = ids_TS.flatten()
    P, E = len(ids_P), num_experts
    sorted_P, pair_P = ids_P.sort(stable=True)
    experts_E1 = torch.arange(E, device=ids_P.device)[:, None]
    count_E = (sorted_P == experts_E1).sum(1)
    start_E = count_E.cumsum(0) - count_E
    tiles_E = (count_E + block_m - 1) // block_m
    end_E = tiles_E.cumsum(0)
    tile_M = torch.arange(most_tiles(P, E, block_m), device=ids_P.device)
    expert_M = (end_E[None, :] <= tile_M[:, None]).sum(1)
    at_M = expert_M.clamp(max=E - 1)
    first_M = start_E[at_M] + (tile_M - end_E[at_M] + tiles_E[at_M]) * block_m
    last_M = start_E[at_M] + count_E[at_M]
    return Groups(pair_P.int(), torch.stack([expert_M, first_M, last_M], dim=1).int())
