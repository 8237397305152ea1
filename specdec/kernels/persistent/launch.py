"""The launch of a product: what the host chooses for it, and its matrices for the copy engine."""

from functools import cache

import torch
from torch import Tensor

from specdec.kernels import GluonDescriptor, gl, next_power_of_2, num_multiprocessors
from specdec.kernels.fp8.weight import Scales, form_of
from specdec.kernels.needed import need
from specdec.kernels.persistent.kernel import Variant, persistent_kernel
from specdec.kernels.tile_shapes import Kind, rows_at_once, takes_turns
from specdec.kernels.tiles import Tiles, dtype_name, rows_to_read

BLOCK_N = 128  # rows of W in a tile of two groups
BLOCK_K = 64  # of 16-bit numbers whose rows take turns
OUT_ROWS = 32  # of a tile of results, in a buffer


def launch_persistent(
    out_STN: Tensor,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiles: Tiles,
    is_gated: bool = False,
    scales: Scales | None = None,
) -> None:
    """Write the parts, or with S = 1 their total. is_gated: gate rows of W before up rows.

    scales: of 8-bit x and W; None: they have 16 bits.
    N must be a multiple of 8, the halves' too. A bias needs S = 1. No launch since the last
    synchronisation may write the weight.
    """
    (S, T, N), K = out_STN.shape, x_TK.shape[1]
    block_m, tail = rows_at_once(dtype_name(x_TK.dtype), tiles.block_m)
    kind: Kind = "gate" if is_gated else "split"
    has_turns = takes_turns(kind, tiles.block_n, tiles.block_m, tiles.cuts)
    groups = tiles.block_n // 64
    height = tiles.block_n // 2 if has_turns else tiles.block_n
    rows, columns = next_power_of_2(tiles.block_n), next_power_of_2(tiles.block_m)  # with scales
    # results in 16 bits, beside one sum, can wait for the next tile
    can_wait = tail == 0 and tiles.splits == S and out_STN.element_size() == 2 and scales is None
    variant = Variant(
        splits=tiles.splits,
        walked=tiles.splits // S,
        is_gated=is_gated and not has_turns,
        has_bias=bias_N is not None,
        tail=tail,
        cuts=tiles.cuts,
        num_stages=tiles.num_stages,
        height=height,
        groups=groups,
        copy_registers=40 if groups == 2 else 24,  # what the groups leave
        is_late=can_wait and K // tiles.splits // tiles.block_k >= block_m // OUT_ROWS,
        has_turns=has_turns,
        form=form_of(scales),
        num_scales=columns + rows * (2 if is_gated else 1) if form_of(scales) == "block" else 0,
        is_shared=scales is not None and scales.is_shared and N % 64 == 0,
    )
    num_tiles = S * -(-N // height) * -(-T // tiles.block_m)
    out_desc = _describe_out(out_STN, height // groups, groups == 3 or is_gated)
    w_descs = _describe_weight(weight_NK, N, tiles, has_turns)
    x_descs = _describe_rows(x_TK, block_m, tail or block_m // tiles.cuts, tiles.block_k)
    bias = weight_NK if bias_N is None else bias_N
    places = describe_scales(scales, bias, N, rows, columns)
    options = {"VARIANT": variant, "num_warps": 4, "launch_pdl": True} | need()
    grid = (min(num_tiles, num_multiprocessors(x_TK.device)),)
    persistent_kernel[grid](out_desc, *w_descs, *x_descs, bias, *places, T, N, K, **options)


def _describe_weight(
    weight_NK: Tensor, N: int, tiles: Tiles, has_turns: bool
) -> tuple[GluonDescriptor, GluonDescriptor]:
    """Describe the gate rows and the up rows, or all rows twice."""
    rows = tiles.block_n if tiles.block_n == BLOCK_N else 64  # no power of two: a group's
    if not has_turns:
        halves = weight_NK[:N], weight_NK[-N:]
        return describe(halves[0], rows, tiles.block_k), describe(halves[1], rows, tiles.block_k)
    # [2N, K] as [N / 8, 2, 8, K]: in a block 8 gate rows, the up rows beside them, 8 more
    K, row = weight_NK.shape[1], weight_NK.stride(0)
    shape, strides = [N // 8, 2, 8, K], [8 * row, N * row, row, 1]
    layout = _shared_layout(weight_NK.dtype, 4)
    desc = GluonDescriptor(weight_NK, shape, strides, [rows // 16, 2, 8, BLOCK_K], layout)
    return desc, desc


def _describe_rows(
    x_TK: Tensor, block_m: int, rest: int, block_k: int
) -> tuple[GluonDescriptor, GluonDescriptor]:
    num_rows = rows_to_read(x_TK)
    descs = [describe(x_TK, rows, block_k) for rows in dict.fromkeys((block_m, rest))]
    for desc in descs:
        desc.shape[0] = num_rows
    return descs[0], descs[-1]


def _describe_out(out_STN: Tensor, columns: int, is_narrow: bool) -> GluonDescriptor:
    """Describe results in blocks, two of each group, that fit into what the ring leaves.

    is_narrow: it has room for blocks of 16 bits alone; those of float32 have half of the rows
    """
    size = out_STN.element_size()
    rows = OUT_ROWS * 2 // size if is_narrow else OUT_ROWS
    layout = _shared_layout(out_STN.dtype, 3, min(128, columns * size))
    shape, strides = list(out_STN.shape), list(out_STN.stride())
    return GluonDescriptor(out_STN, shape, strides, [1, rows, columns], layout)


def describe(matrix: Tensor, rows: int, block_k: int) -> GluonDescriptor:
    """Describe a matrix in blocks of these rows and columns."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    layout = _shared_layout(matrix.dtype, 2)
    return GluonDescriptor(matrix, shape, strides, [rows, block_k], layout)


def describe_scales(
    scales: Scales | None, other: Tensor, N: int, rows: int, columns: int
) -> tuple[Tensor | GluonDescriptor, ...]:
    """Give scales of x, W and its up rows to a kernel: as they are, in blocks of a group, or other.

    N: rows of W, or of its gate rows. rows, columns: of W and of x in a block
    """
    if scales is None:
        return other, other, other
    if scales.w.dim() == 1:
        return scales.x, scales.w[:N], scales.w[-N:]
    return (
        _groups(scales.x, columns),
        _groups(scales.w[:, :N], rows),
        _groups(scales.w[:, -N:], rows),
    )


def _groups(scales_GX: Tensor, width: int) -> GluonDescriptor:
    shape, strides = list(scales_GX.shape), list(scales_GX.stride())
    layout = _shared_layout(scales_GX.dtype, 2, 0)
    return GluonDescriptor(scales_GX, shape, strides, [1, width], layout)


@cache
def _shared_layout(dtype: torch.dtype, rank: int, swizzled: int = 128) -> object:
    bits = 8 * dtype.itemsize
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=bits, rank=rank)
