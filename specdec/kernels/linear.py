"""y = x W^T, with one order of the reduction over K for every number of rows.

A row's result depends on the row and the weight only. K is cut into splits by the weight's shape,
and their sums are added in pairs (sum_order.py); inside a split the tensor cores add 16 of K after
another to one float32 accumulator, whatever the tile. W is on the wide side of the tensor cores'
product for every M, so that a row is always a column of the same instruction.

`linear` gives the finished product of one split; `split_linear` leaves parts, of some splits each,
to its reader, which adds them as it loads (add_rms_norm, rotate_and_store). Its weight may be some
rows of another, or on several GPUs neighbouring columns, whose sum is one part of more.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import TensorDescriptor, jit, launch_options, pick, tl, use_triton
from specdec.kernels.backend import backend
from specdec.kernels.few_rows import has_few_rows, launch_few_rows
from specdec.kernels.invariant import blocked_product
from specdec.kernels.kept import store_kept
from specdec.kernels.needed import need
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.persistent.launch import launch_persistent
from specdec.kernels.sum_order import Whole, add_now, add_parts, split_blocks, splits_of_part
from specdec.kernels.tile_shapes import row_pieces
from specdec.kernels.tiles import (
    Tiles,
    most_rows_in_parts,
    num_tiles,
    place_of,
    rows_to_read,
    tiles_for,
    tiles_for_columns,
)


class Sums(NamedTuple):
    """An unfinished product: the reader adds parts in pairs, then the bias, and rounds once.

    Of one part and without a bias nothing is left to add, and it is rounded already. Parts of
    experts have a weight in each row, and are added in order; they have no bias, and a part of
    weight 0 may be anything. On several GPUs a row's parts are at places among those of all.
    """

    parts_STN: Tensor  # [parts, T, N] float32, or rounded: [1, T, N], and all parts of experts
    bias_N: Tensor | None
    weights_TS: Tensor | None = None  # [T, parts] float32
    factor: float = 1.0  # norms.py adds the rounded product times this to the stream
    places_TS: Tensor | None = None  # [T, slots] int32: where the part of each weight is; None: s

    def finish(self, dtype: torch.dtype) -> Tensor:
        """Add the parts and the bias, and round, as every reader does."""
        if self.weights_TS is not None:
            return self._weighted().to(dtype)
        total_TN = add_parts(self.parts_STN)
        return (total_TN if self.bias_N is None else total_TN + self.bias_N.float()).to(dtype)

    def _weighted(self) -> Tensor:
        assert self.weights_TS is not None
        assert self.bias_N is None
        parts_STN = self.parts_STN
        if self.places_TS is not None:
            rows_T = torch.arange(parts_STN.shape[1], device=parts_STN.device)
            parts_STN = parts_STN[self.places_TS.t().long(), rows_T]
        total_TN = parts_STN.new_zeros(parts_STN.shape[1:], dtype=torch.float32)
        for part_TN, weight_T1 in zip(parts_STN, self.weights_TS.split(1, 1), strict=True):
            total_TN = total_TN + weight_T1 * part_TN.float().where(weight_T1 != 0, 0.0)
        return total_TN


@opaque(
    lambda x, weight, bias, dtype: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype)
)
def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply to [T, N] in `out_dtype` (default: x's); float32 gives the accumulators.

    No launch since the last synchronisation may write the weight.
    """
    launch = backend.get().linear or launch_linear
    return pick(x_TK, launch, linear_ref)(x_TK, weight_NK, bias_N, out_dtype or x_TK.dtype)


def split_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    first: int = 0,
    whole: Whole | None = None,
) -> Sums:
    """Multiply to float32 parts [parts, T, N], or to x's dtype where one sum is all.

    No launch since the last synchronisation may write the weight.
    first: columns before it may hold anything; their weights are not read
    whole: the shape of the weight of which this one has some rows, whose columns of the result have
           the bits of all; or neighbouring columns, whose sum is a part of float32 that a reader
           adds to the others in their order. None: the weight is whole
    """
    is_finished = bias_N is None and (whole is None or whole[1] == weight_NK.shape[1])
    dtype = x_TK.dtype if is_finished else torch.float32
    return Sums(_split_sums(x_TK, weight_NK, dtype, first, whole), bias_N)


def _empty_sums(
    x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, first: int, whole: Whole | None = None
) -> Tensor:
    parts = num_parts(x_TK, weight_NK, whole)
    return x_TK.new_empty(
        parts, x_TK.shape[0], weight_NK.shape[0], dtype=dtype if parts == 1 else torch.float32
    )


@opaque(_empty_sums)
def _split_sums(
    x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, first: int, whole: Whole | None = None
) -> Tensor:
    if not use_triton(x_TK):
        return split_linear_ref(x_TK, weight_NK, dtype, first, whole)
    other = backend.get().split_linear
    if other is not None:
        return other(x_TK, weight_NK, dtype, first)
    return launch_split_linear(x_TK, weight_NK, dtype, first, whole=whole)


def num_parts(x_TK: Tensor, weight_NK: Tensor, whole: Whole | None = None) -> int:
    """Count the parts that `split_linear` leaves; compares a symbolic number of rows only once."""
    if not use_triton(x_TK):
        return 1
    most = most_rows_in_parts(weight_NK.shape[1], whole)
    parts = tiles_for("split", x_TK, weight_NK, most, whole).parts
    return 1 if parts == 1 or x_TK.shape[0] > most else parts


def launch_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """tiles: None: the fastest that are known, as everywhere but in tuning"""
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=out_dtype, device=x_TK.device)
    _multiply(out_TN, x_TK, weight_NK, bias_N, tiles or tiles_for("whole", x_TK, weight_NK), 0)
    return out_TN


def launch_split_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    tiles: Tiles | None = None,
    whole: Whole | None = None,
) -> Tensor:
    """Leave [parts, T, N]. dtype: of a sum that is all. The others: as above."""
    tiles = tiles or tiles_for("split", x_TK, weight_NK, whole=whole)
    if first > 0 and tiles.cuts != 0:  # persistent/ makes all columns
        tiles = tiles_for_columns(tiles, x_TK, weight_NK[first:])
    parts_STN = torch.empty(
        (tiles.parts, len(x_TK), len(weight_NK)),
        dtype=dtype if tiles.parts == 1 else torch.float32,
        device=x_TK.device,
    )
    _multiply(parts_STN, x_TK, weight_NK, None, tiles, first)
    return parts_STN


def _multiply(
    out: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tiles: Tiles, first: int
) -> None:
    """Launch the kernel that is made for these tiles."""
    K = x_TK.shape[1]
    assert tiles.splits == 1 or K % (tiles.splits * tiles.block_k) == 0, (K, tiles)
    if tiles.cuts != 0:
        launch_persistent(out, x_TK, weight_NK, bias_N, tiles)
    elif has_few_rows(x_TK, tiles):
        launch_few_rows(out, x_TK, weight_NK, bias_N, tiles, first)
    else:
        _launch(out, x_TK, weight_NK, bias_N, tiles, first)


def _launch(
    out: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tiles: Tiles, first: int
) -> None:
    T, K = x_TK.shape
    N = len(weight_NK)
    grid = (num_tiles(N - first, T, tiles), tiles.parts)
    descs = (*describe_rows(x_TK, tiles), describe(weight_NK, tiles.block_n, tiles.block_k))
    bias = weight_NK if bias_N is None else bias_N
    flags = {"HAS_BIAS": bias_N is not None, "SPLITS": tiles.splits, "WALKED": tiles.walked}
    options = tile_options(x_TK, tiles)
    _linear_kernel[grid](out, *descs, bias, T, N, K, first, **flags, **options)


def tile_options(x_TK: Tensor, tiles: Tiles) -> dict[str, object]:
    """Give the constants and options of kernels with a program for each tile."""
    _, tail = row_pieces(tiles.block_m)
    options: dict[str, object] = {"TAIL": tail, "num_stages": tiles.num_stages}
    return options | {"num_warps": tiles.num_warps} | launch_options(x_TK) | need()


def describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix for the copy engine, tile by tile; outside it reads 0."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or row_bytes % 16 != 0 or matrix.data_ptr() % 16 != 0:
        raise ValueError(
            f"matrix of shape {tuple(matrix.shape)}, strides {matrix.stride()}, {matrix.dtype}: "
            "the kernels need rows that begin at multiples of 16 bytes"
        )
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def describe_rows(x_TK: Tensor, tiles: Tiles) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describe the rows to multiply, with rows after them that fill a tile; the tail's, if any."""
    num_rows = rows_to_read(x_TK)
    pieces = (rows for rows in row_pieces(tiles.block_m) if rows > 0)
    descs = [describe(x_TK, rows, tiles.block_k) for rows in pieces]
    for desc in descs:
        desc.shape[0] = num_rows
    return descs[0], descs[-1]


@jit
def _linear_kernel(
    out_ptr,  # [T, N], or [parts, T, N]; several parts in float32
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    tail_desc,  # [T, K] in tiles [TAIL, BLOCK_K]
    w_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K]
    bias_ptr,  # [N]
    T,
    N,
    K,
    first,  # column; those before it are left out
    HAS_BIAS: tl.constexpr,
    TAIL: tl.constexpr,
    SPLITS: tl.constexpr,
    WALKED: tl.constexpr,  # of the splits, by a program
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    n_tiles = tl.cdiv(N - first, BLOCK_N)
    n_tile, m_tile = place_of(tl.program_id(0), n_tiles, tl.cdiv(T, BLOCK_M + TAIL))
    n0 = first + n_tile * BLOCK_N
    m0 = m_tile * (BLOCK_M + TAIL)
    part = tl.program_id(1)
    out_ptr += part.to(tl.int64) * T * N
    wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    blocks = split_blocks(K, w_desc.block_shape[1], SPLITS)
    descs = (x_desc, tail_desc, w_desc)
    total, rest = sums_of(descs, n0, m0, part * WALKED, blocks, TAIL, WALKED)
    let_the_next_start(PDL)
    if TAIL > 0:
        store_tile(out_ptr, bias_ptr, rest, n0, m0 + BLOCK_M, T, N, HAS_BIAS)
    store_tile(out_ptr, bias_ptr, total, n0, m0, T, N, HAS_BIAS)


@jit
def store_tile(out_ptr, bias_ptr, total, n0, m0, T, N, HAS_BIAS: tl.constexpr):
    """Add the bias, round once, and store."""
    n = n0 + tl.arange(0, total.shape[0])
    m = m0 + tl.arange(0, total.shape[1])
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (m < T)[None, :]
    store_kept(out, total.to(out_ptr.dtype.element_ty), inside)


@jit
def sums_of(descs, n0, m0, split, blocks, TAIL: tl.constexpr, COUNT: tl.constexpr):
    """Sum COUNT splits of a tile, from `split` on, and of its tail; blocks: of K in each."""
    if COUNT == 1:
        if TAIL > 0:
            return block_sum_and_tail(descs, n0, m0, split * blocks, blocks)
        else:
            total = block_sum(descs[0], descs[2], n0, m0, split * blocks, blocks)
            return total, total
    else:
        HALF: tl.constexpr = (COUNT + 1) // 2
        low, low_rest = sums_of(descs, n0, m0, split, blocks, TAIL, HALF)
        high, high_rest = sums_of(descs, n0, m0, split + HALF, blocks, TAIL, COUNT - HALF)
        total = add_now(low, high)
        if TAIL > 0:
            return total, add_now(low_rest, high_rest)
        else:
            return total, total


@jit
def block_sum(x_desc, w_desc, n0, m0, first, blocks):
    """Sum some blocks of K of W x^T as a float32 tile [BLOCK_N, BLOCK_M]."""
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_K: tl.constexpr = w_desc.block_shape[1]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in range(blocks):
        k = (first + i) * BLOCK_K
        w, x = w_desc.load([n0, k]), x_desc.load([m0, k])
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@jit
def block_sum_and_tail(descs, n0, m0, first, blocks):
    """Sum BLOCK_M + TAIL rows, in two tiles that share each tile of W."""
    x_desc, tail_desc, w_desc = descs
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_K: tl.constexpr = w_desc.block_shape[1]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    TAIL: tl.constexpr = tail_desc.block_shape[0]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_N, TAIL), tl.float32)
    for i in range(blocks):
        k = (first + i) * BLOCK_K
        w = w_desc.load([n0, k])
        acc = tl.dot(w, tl.trans(x_desc.load([m0, k])), acc, input_precision="ieee")
        x_rest = tl.trans(tail_desc.load([m0 + BLOCK_M, k]))
        rest = tl.dot(w, x_rest, rest, input_precision="ieee")
    return acc, rest


def linear_ref(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return Sums(blocked_product(x_TK, weight_NK)[None], bias_N).finish(out_dtype)


def split_linear_ref(
    x_TK: Tensor,
    weight_NK: Tensor,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    whole: Whole | None = None,
) -> Tensor:
    """Compute all columns, as one part."""
    N, K = weight_NK.shape
    splits = splits_of_part(N, K, whole)
    return blocked_product(x_TK, weight_NK, splits).to(dtype)[None]
