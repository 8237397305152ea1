"""A product's matrices as the copy engine takes them: what a copy has, and how it is laid out."""

from functools import cache

import torch
from torch import Tensor

from specdec.kernels import GluonDescriptor, gl
from specdec.kernels.persistent.variant import BLOCK_K, BLOCK_N, OUT_ROWS
from specdec.kernels.tiles import Tiles, rows_to_read


def describe_weight(
    weight_NK: Tensor, N: int, tiles: Tiles, has_turns: bool
) -> tuple[GluonDescriptor, GluonDescriptor]:
    """Describe the gate rows and the up rows, or all rows twice."""
    rows = tiles.block_n if tiles.block_n == BLOCK_N else 64  # no power of two: a group's
    if has_turns:
        desc = _describe_turns(weight_NK, rows)
        return desc, desc
    return describe(weight_NK[:N], rows), describe(weight_NK[-N:], rows)


def describe_rows(x_TK: Tensor, block_m: int, rest: int) -> tuple[GluonDescriptor, GluonDescriptor]:
    """Describe rows in blocks of block_m, and in blocks of `rest`."""
    num_rows = rows_to_read(x_TK)
    descs = [describe(x_TK, rows) for rows in dict.fromkeys((block_m, rest))]
    for desc in descs:
        desc.shape[0] = num_rows
    return descs[0], descs[-1]


def describe_out(out_STN: Tensor, columns: int, groups: int) -> GluonDescriptor:
    """Describe results in blocks, two of each group, that fit into what the ring leaves."""
    rows = OUT_ROWS if groups == 2 else OUT_ROWS * 2 // out_STN.element_size()
    shape, strides = list(out_STN.shape), list(out_STN.stride())
    layout = _shared_layout(out_STN.dtype, 3, min(128, columns * out_STN.element_size()))
    return GluonDescriptor(out_STN, shape, strides, [1, rows, columns], layout)


def describe(matrix: Tensor, rows: int, block_k: int = BLOCK_K) -> GluonDescriptor:
    """Describe a matrix in blocks of these rows and columns."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    layout = _shared_layout(matrix.dtype, 2)
    return GluonDescriptor(matrix, shape, strides, [rows, block_k], layout)


def _describe_turns(weight_NK: Tensor, rows: int) -> GluonDescriptor:
    """View [2N, K] as [N / 8, 2, 8, K]: in a block 8 gate rows, the up rows beside them, 8 more."""
    N, K = len(weight_NK) // 2, weight_NK.shape[1]
    row = weight_NK.stride(0)
    shape, strides = [N // 8, 2, 8, K], [8 * row, N * row, row, 1]
    block = [rows // 16, 2, 8, BLOCK_K]
    return GluonDescriptor(weight_NK, shape, strides, block, _shared_layout(weight_NK.dtype, 4))


@cache
def _shared_layout(dtype: torch.dtype, rank: int, swizzled: int = 128) -> object:
    bits = 8 * dtype.itemsize
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=bits, rank=rank)
