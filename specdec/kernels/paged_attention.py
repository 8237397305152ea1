"""Causal attention of query rows over a paged cache, reduced in tiles of 64 keys at absolute positions.

A row at position p reads keys 0..p of its request, tile by tile, with the running maximum and denominator of online
softmax (arXiv 2112.05682). Tile borders do not depend on who else is in the step, so neither does the row's result: a
tile beyond a row's position multiplies by 1 and adds 0. Values of keys beyond a tile's last row are read as 0,
because 0 x NaN is NaN and nobody promises what unwritten slots hold.

The twin works on tiles of 8 query rows of one request, laid out by a `TilePlan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.invariant import ROWS, blocked_exp, tree_sum


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Which rows of the step form the twin's query tiles, and which batch slot each tile belongs to."""

    rows: Tensor  # [tiles x 8] int64 row of the step, T = no row
    reqs: Tensor  # [tiles] int64 batch slot
    num_rows: int  # T


def plan_tiles(query_lens: Sequence[int], num_rows: int, device: torch.device) -> TilePlan:
    """Cut consecutive runs of rows, one per batch slot, into tiles of 8; rows behind the last run belong to nobody."""
    rows: list[int] = []
    reqs: list[int] = []
    start = 0
    for req, length in enumerate(query_lens):
        tiles = -(-length // ROWS)
        rows += [*range(start, start + length), *[num_rows] * (tiles * ROWS - length)]
        reqs += [req] * tiles
        start += length
    return TilePlan(torch.tensor(rows, device=device), torch.tensor(reqs, device=device), num_rows)


def paged_attention_ref(
    q_THC: Tensor,
    out_THC: Tensor,
    cache: Tensor,
    block_table_BM: Tensor,
    positions_T: Tensor,
    tiles: TilePlan,
    max_seq_len: int,
) -> None:
    """out_THC of every planned row is overwritten; other rows become 0. cache: [2, N + 1, G, S, C] of one layer.

    block_table_BM: blocks of each batch slot. max_seq_len: a host-side bound on positions + 1 in this step.
    """
    _, _, G, S, C = cache.shape
    H, NT = q_THC.shape[1], len(tiles.reqs)
    q = F.pad(q_THC.float() * C**-0.5, (0, 0, 0, 0, 0, 1))[tiles.rows].view(NT, ROWS, G, H // G, C)
    q = q.permute(0, 2, 3, 1, 4).reshape(NT * G, H // G * ROWS, C)
    position = F.pad(positions_T, (0, 1))[tiles.rows].view(NT, 1, 1, ROWS, 1)
    last = position.amax(dim=3, keepdim=True)
    peak = q.new_full((NT, G, H // G, ROWS, 1), -torch.inf)
    total, acc = torch.zeros_like(peak), q.new_zeros(NT, G, H // G, ROWS, C)
    for tile in range(-(-max_seq_len // S)):
        key = torch.arange(tile * S, (tile + 1) * S, device=q.device)
        k, v = cache[:, block_table_BM[tiles.reqs, tile]].float().unbind(0)  # [NT, G, S, C] each
        scores = torch.bmm(q, k.view(NT * G, S, C).transpose(1, 2)).view(NT, G, H // G, ROWS, S)
        scores = torch.where(key <= position, scores, -torch.inf)
        previous, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, decay = blocked_exp(scores - peak), blocked_exp(previous - peak)
        v = torch.where((key <= last).view(NT, 1, S, 1), v, 0.0)
        product = torch.bmm(weights.view(NT * G, H // G * ROWS, S), v.view(NT * G, S, C))
        total, acc = total * decay + tree_sum(weights), acc * decay + product.view(acc.shape)
    rows = (acc / total).permute(0, 3, 1, 2, 4).reshape(NT * ROWS, H, C).to(out_THC.dtype)
    padded = out_THC.new_zeros(tiles.num_rows + 1, H, C)
    padded[tiles.rows] = rows
    out_THC.copy_(padded[:-1])
