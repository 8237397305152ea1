"""The torch twin of attention: tiles of 8 query rows by 64 keys, powers of e, no splits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention.path_tails import path_tails_ref, paths_of_tiles
from specdec.kernels.attention.query_rows import (
    LISTED_ROWS,
    Paths,
    QueryRows,
    TilePlan,
    uniform_tiles,
)
from specdec.kernels.attention.splits import attend_tile_ref, before_all_ref
from specdec.kernels.invariant import ROWS


def paged_attention_ref(
    q_THC: Tensor,
    out_THC: Tensor,
    cache: Tensor,
    rows: QueryRows,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """Attend in tiles of 8 query rows of one request, by rows.tiles; rows in no tile become 0.

    The arguments are those of paged_attention.
    """
    tiles = rows.tiles or _tiles_of(rows)
    q_THC, out_THC = q_THC[: rows.num_rows], out_THC[: rows.num_rows]
    _, _, G, S, C = cache.shape
    H = q_THC.shape[1]
    NT = len(tiles.reqs)
    scaled_THC = q_THC.float() * (C**-0.5 if scale is None else scale)
    q = F.pad(scaled_THC, (0, 0, 0, 0, 0, 1))[tiles.rows].view(NT, ROWS, G, H // G, C)
    q = q.permute(0, 2, 3, 1, 4).reshape(NT * G, H // G * ROWS, C)
    position = F.pad(rows.positions, (0, 1))[tiles.rows].view(NT, 1, 1, ROWS, 1)
    last = position.amax(dim=3, keepdim=True)
    block_table_NM = rows.block_table[rows.idx_mapping[tiles.reqs]]
    paths = None if rows.paths is None else paths_of_tiles(rows.paths, tiles.rows, tiles.reqs)
    is_row = (tiles.rows < rows.num_rows).view(position.shape)
    first = _first_seen(torch.where(is_row, position, last), last, paths, window)
    if paths is not None:  # only whole tiles of shared keys
        last = torch.minimum(last, paths.starts.view(NT, 1, 1, 1, 1) // S * S - 1)
    last_shared = torch.minimum(position, last)
    first_there = first.amin(dim=3, keepdim=True)
    part = before_all_ref(q, NT, G, H // G, sinks_H)
    for tile in range(-(-rows.max_seq_len // S)):
        key = torch.arange(tile * S, (tile + 1) * S, device=q.device)
        k, v = cache[:, block_table_NM[:, tile]].float().unbind(0)  # [NT, G, S, C] each
        is_there = (key >= first_there) & (key <= last)
        part = attend_tile_ref(q, k, v, is_there, (key >= first) & (key <= last_shared), part)
    if paths is not None:
        part = path_tails_ref(q, cache, block_table_NM, position, paths, part, window)
    total = part.total
    if window is not None:  # a row of padding may see no key
        total = torch.where(total == 0.0, 1.0, total)
    finished = (part.acc / total).permute(0, 3, 1, 2, 4).reshape(NT * ROWS, H, C)
    padded = out_THC.new_zeros(tiles.num_rows + 1, H, C)
    padded[tiles.rows] = finished.to(out_THC.dtype)
    out_THC.copy_(padded[:-1])


def _first_seen(position: Tensor, last: Tensor, paths: Paths | None, window: int | None) -> Tensor:
    """Find the first key that each row sees, and rows of padding beside them. [tiles, 1, 1, 8, 1]

    position: [tiles, 1, 1, 8, 1]. last: the largest of a tile's. paths: of the tiles.
    """
    if window is None:
        return torch.zeros_like(position)
    least = last - ROWS + 1 if paths is None else paths.starts.view(-1, 1, 1, 1, 1)
    position = torch.where(position < least, torch.maximum(last, least), position)
    return (position - window + 1).clamp(min=0)


def _tiles_of(rows: QueryRows) -> TilePlan:
    """Cut rows into tiles; of ragged ones as many for each batch slot as the longest may need."""
    starts = rows.query_start_loc
    if rows.listed is not None:
        return _listed_tiles(rows, rows.listed)
    if starts is None:
        slots, device = len(rows.idx_mapping), rows.positions.device
        return uniform_tiles(slots, rows.max_query_len, rows.num_rows, device)
    per_slot = -(-rows.max_query_len // ROWS)
    i_X = torch.arange(per_slot * ROWS, device=starts.device)
    row_BX = starts[:-1, None] + i_X
    row_BX = torch.where(row_BX < starts[1:, None], row_BX, rows.num_rows)
    req_B = torch.arange(len(starts) - 1, device=starts.device)
    return TilePlan(row_BX.flatten(), req_B.repeat_interleave(per_slot), rows.num_rows)


def _listed_tiles(rows: QueryRows, listed_X3: Tensor) -> TilePlan:
    slot_X, first_X, end_X = listed_X3.unbind(1)
    starts = rows.query_start_loc
    assert starts is not None, "listed tiles of slots without rows"
    at_X = starts[slot_X] - (first_X + 1) * LISTED_ROWS
    end_X = torch.where(first_X < 0, starts[slot_X + 1], end_X)
    first_X = torch.where(first_X < 0, at_X, first_X)
    row_XR = first_X[:, None] + torch.arange(LISTED_ROWS, device=first_X.device)
    row_XR = torch.where(row_XR < end_X[:, None], row_XR, rows.num_rows)
    return TilePlan(row_XR.flatten(), slot_X, rows.num_rows)
