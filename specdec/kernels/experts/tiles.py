"""Tiles of the experts' products, by the class of rows and the sizes of the experts.

Tiles change no bit, as in tile_shapes.py: 64 rows of W or more, whole warp groups, no splits. Until
tables know experts a rule chooses: as many rows of x as an expert is likely to have, and where
memory sets the pace, a ring that lets programs share a multiprocessor: one starts while others
load.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch

from specdec.kernels import next_power_of_2
from specdec.kernels.tile_shapes import SHARED_MEMORY, Shape

FEW_ROWS = 64  # up to here nothing is sorted: a tile has all rows
BLOCK_M = (16, 128)  # least and most rows of x in a tile
COMPUTING_ROWS = 128  # tiles of so many rows keep the tensor cores busy
SHORT_K = 1024  # programs with less take as long to start as to load
RESERVED = 2048  # bytes of a program beside its ring
MOST_SUMS = 128  # registers of a thread
# block_n, block_k, num_stages, num_warps; the likeliest first
WAITING = (
    *((64, 128, 4, 4), (64, 128, 3, 4), (64, 64, 6, 4), (64, 64, 4, 4)),
    *((128, 128, 3, 4), (128, 64, 4, 4), (128, 64, 3, 4), (64, 64, 3, 4)),
)
COMPUTING = ((128, 64, 4, 8), (128, 64, 3, 8), (256, 64, 4, 8), (64, 64, 4, 4))
Part = Literal["gate_up", "down"]


class ExpertTiles(NamedTuple):
    """How both products are cut: with the same block_m, since a sorted tile has rows of x."""

    gate_up: Shape
    down: Shape
    is_sorted: bool  # else block_m is no less than the number of rows


def expert_tiles(
    rows: int, num_chosen: int, gate_up: torch.Size, down: torch.Size, dtype: torch.dtype
) -> ExpertTiles:
    """Choose the tiles of a `row_class`. gate_up: [E, 2I, D]; down: [E, D, I]."""
    return _choose(rows, num_chosen, gate_up[0], gate_up[2], down[2], dtype)


@cache
def _choose(rows: int, k: int, E: int, D: int, I: int, dtype: torch.dtype) -> ExpertTiles:
    block_m = rows_of_tile(rows, k, E)
    if dtype == torch.float32:
        shape = Shape(64, min(block_m, 64), 32, 3, 4)
        return ExpertTiles(shape, shape, rows > FEW_ROWS)
    shapes = (candidates("gate_up", block_m, D)[0], candidates("down", block_m, I)[0])
    return ExpertTiles(*shapes, rows > FEW_ROWS)


def rows_of_tile(rows: int, num_chosen: int, num_experts: int) -> int:
    """Choose the rows of x in a tile: half as many again as experts have on average.

    So most experts have a tile each, and read their weights once.
    """
    least, most = BLOCK_M
    if rows <= FEW_ROWS:
        return rows
    return min(max(next_power_of_2(-(-3 * rows * num_chosen // (2 * num_experts))), least), most)


def candidates(part: Part, block_m: int, K: int) -> list[Shape]:
    """List what may be fastest, the likeliest first."""
    of_w = 2 if part == "gate_up" else 1
    is_computing = block_m >= COMPUTING_ROWS
    beside = 1 if is_computing else 2 if K > SHORT_K else 3  # programs that share shared memory
    found = []
    for block_n, block_k, num_stages, num_warps in COMPUTING if is_computing else WAITING:
        size = (of_w * block_n + block_m) * block_k * 2 * num_stages + RESERVED
        sums = of_w * block_n * block_m // (32 * num_warps)
        if size * beside <= SHARED_MEMORY and sums <= MOST_SUMS:
            found.append(Shape(block_n, block_m, block_k, num_stages, num_warps))
    return found
