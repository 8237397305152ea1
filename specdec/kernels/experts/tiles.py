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
from specdec.kernels.experts.weight import Form
from specdec.kernels.tile_shapes import SHARED_MEMORY, Shape, row_class

FEW_ROWS = 64  # up to here nothing is sorted: a tile has all rows
# the same for MXFP4, whose weights come so soon that a product by all rows takes longer
FEW_ROWS_PACKED = 16
MOST_GATED_PACKED = 64  # block_n, since blocks of gate and up lie in turns
MOST_ROWS = 8192  # the last class, and all rows above
ROWS = (16, 32, 48, 64, 96, 128, 160, 192)  # of x in a tile
MANY_ROWS = 128  # of tiles that no expert fits into
COMPUTING_ROWS = 96  # tiles of so many rows keep the tensor cores busy
SHORT_K = 1024  # programs with less take long to start for what they load
# of a number, of MXFP4 with its share of a scale
BYTES_OF_W: dict[Form, float] = {"plain": 2.0, "packed": 17 / 32, "fp8": 1.0}
RESERVED = 1536  # bytes of a program beside its ring
MOST_SUMS = 160  # registers of a thread
MOST_SUMS_PACKED = 90  # of four warps, which keep numbers of MXFP4 beside them
Part = Literal["gate_up", "down"]
Cuts = tuple[tuple[int, int, int, int], ...]  # block_n, block_k, num_stages, num_warps
# the likeliest first
WAITING: Cuts = (
    *((64, 128, 4, 4), (128, 64, 4, 4), (64, 128, 3, 4)),
    *((64, 64, 6, 4), (64, 64, 5, 4), (64, 64, 4, 4)),
    *((128, 64, 3, 4), (128, 128, 3, 4), (64, 64, 3, 4)),
)
# of MXFP4, whose pace few instructions set: one group of warps has a tile's gate and up rows
WAITING_PACKED: Cuts = (
    *((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4)),
    *((64, 64, 6, 4), (64, 64, 4, 4), (64, 64, 3, 4)),
)
# of 8-bit numbers, whose accumulators are beside the sums
WAITING_FP8: Cuts = (
    *((64, 128, 6, 4), (64, 128, 4, 4), (64, 128, 8, 4)),
    *((128, 128, 4, 4), (64, 128, 3, 4), (128, 128, 3, 4)),
)
COMPUTING_FP8: Cuts = (64, 128, 4, 4), (64, 128, 4, 8), (64, 128, 3, 4), (64, 128, 3, 8)
ROWS_FP8 = (16, 32, 64, 128)  # of x in a tile
COMPUTING: Cuts = (
    *((128, 64, 4, 8), (128, 64, 3, 8), (64, 64, 4, 8)),
    *((64, 64, 3, 8), (64, 64, 3, 4), (64, 64, 2, 8), (256, 64, 3, 8)),
)


class ExpertTiles(NamedTuple):
    """How both products are cut: with the same block_m, since a sorted tile has rows of x."""

    gate_up: Shape
    down: Shape
    is_sorted: bool  # else block_m is no less than the number of rows


def expert_tiles(
    num_rows: int, num_chosen: int, E: int, D: int, I: int, dtype: torch.dtype, form: Form
) -> ExpertTiles:
    """Choose the tiles of a class of rows, for gate_up [E, 2I, D] and down [E, D, I]."""
    return _choose(class_of(num_rows), num_chosen, E, D, I, dtype, form)


def class_of(num_rows: int) -> int:
    """Find the class of a number of rows: a `row_class`, or above these a power of 2."""
    return row_class(num_rows) if num_rows <= 1024 else min(next_power_of_2(num_rows), MOST_ROWS)


@cache
def _choose(
    rows: int, k: int, E: int, D: int, I: int, dtype: torch.dtype, form: Form
) -> ExpertTiles:
    block_m = rows_of_tile(rows, k, E, form)
    is_sorted = rows > few_rows(form)
    if dtype == torch.float32 and form != "fp8":
        shape = Shape(64, min(block_m, 64), 64 if form == "packed" else 32, 3, 4)
        return ExpertTiles(shape, shape, is_sorted)
    first = candidates("gate_up", block_m, D, form)[0]
    second = candidates("down", block_m, I, form)[0]
    return ExpertTiles(first, second, is_sorted)


def few_rows(form: Form) -> int:
    """Give the most rows that are not sorted."""
    return FEW_ROWS_PACKED if form == "packed" else FEW_ROWS


def rows_of_tile(rows: int, num_chosen: int, num_experts: int, form: Form = "plain") -> int:
    """Choose the rows of x in a tile: enough for most experts, which then read their weights once.

    If rows choose at random, 98 % of the experts have fewer than two deviations above the mean.
    """
    if rows <= few_rows(form):
        return rows
    mean = rows * num_chosen / num_experts
    heights = ROWS_FP8 if form == "fp8" else ROWS
    fitting = (each for each in heights if each >= mean + 2 * mean**0.5)
    return next(fitting, MANY_ROWS)


def candidates(part: Part, block_m: int, K: int, form: Form = "plain") -> list[Shape]:
    """List what may be fastest, the likeliest first: of which enough share a multiprocessor."""
    of_w = 2 if part == "gate_up" else 1
    is_computing = block_m >= COMPUTING_ROWS
    beside = (1 if is_computing else 2) + (K <= SHORT_K)
    found: dict[bool, list[Shape]] = {True: [], False: []}
    of_form = {"plain": WAITING, "packed": WAITING_PACKED, "fp8": WAITING_FP8}
    computing = COMPUTING_FP8 if form == "fp8" else COMPUTING
    for block_n, block_k, num_stages, num_warps in computing if is_computing else of_form[form]:
        if form == "packed" and part == "gate_up" and block_n > MOST_GATED_PACKED:
            continue
        width = of_w * block_n * BYTES_OF_W[form] + block_m * (1 if form == "fp8" else 2)
        size = int(width * block_k) * num_stages + RESERVED
        sums = of_w * block_n * block_m // (32 * num_warps)
        most = MOST_SUMS_PACKED if form == "packed" and num_warps == 4 else MOST_SUMS
        if form == "fp8":  # accumulators of gate rows or up rows
            sums += sums // of_w
        if size <= SHARED_MEMORY and sums <= most:
            shape = Shape(block_n, block_m, block_k, num_stages, num_warps)
            found[size * beside <= SHARED_MEMORY].append(shape)
    return found[True] + found[False]
