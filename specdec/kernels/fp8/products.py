"""y = x W^T in 8-bit floats: finished, as sums for a reader, and the first half of SwiGLU.

They are linear.py's and gate_up.py's products for rows and weights with scales; __init__.py says
how these are summed. W is on the wide side of the tensor cores' product for every number of rows.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, pick, tl, use_triton
from specdec.kernels.backend import backend
from specdec.kernels.few_rows import has_few_rows, launch_few_rows
from specdec.kernels.fp8.sums import sums_of
from specdec.kernels.fp8.weight import GROUP, Fp8, Fp8Rows, Scales, num_groups
from specdec.kernels.gate_up import store_gated
from specdec.kernels.invariant import blocked_exp, blocked_product
from specdec.kernels.linear import Sums, describe, describe_rows, num_parts, store_tile
from specdec.kernels.needed import need
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.persistent.launch import launch_persistent
from specdec.kernels.sum_order import Whole, add_parts, split_blocks, splits_of_part
from specdec.kernels.tile_shapes import rows_of_tiles
from specdec.kernels.tiles import (
    Tiles,
    num_tiles,
    place_of,
    tiles_for,
    tiles_for_columns,
)


@opaque(
    lambda x, weight, bias, dtype: x.codes_TK.new_empty(
        x.codes_TK.shape[0], weight.codes_NK.shape[0], dtype=dtype
    )
)
def fp8_linear(x: Fp8Rows, weight: Fp8, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply to [T, N] in `dtype`. x, weight: of one form.

    No launch since the last synchronisation may write the weight.
    """
    launch = backend.get().fp8_linear or launch_fp8_linear
    return pick(x.codes_TK, launch, fp8_linear_ref)(x, weight, bias_N, dtype)


def fp8_split_linear(
    x: Fp8Rows,
    weight: Fp8,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    first: int = 0,
    whole: Whole | None = None,
) -> Sums:
    """Multiply to float32 parts [parts, T, N], or to `dtype` where one sum is all.

    x, weight: of one form. first, whole: as split_linear of linear.py has them; columns of another
        weight begin and end at multiples of 128.
    No launch since the last synchronisation may write the weight.
    """
    K = weight.codes_NK.shape[1]
    is_finished = bias_N is None and (whole is None or whole[1] == K)
    dtype = dtype if is_finished else torch.float32
    return Sums(_fp8_sums(x, weight, dtype, first, whole), bias_N)


@opaque(
    lambda x, weight, bias, dtype: x.codes_TK.new_empty(
        x.codes_TK.shape[0], weight.codes_NK.shape[0] // 2, dtype=dtype
    )
)
def fp8_gate_up(x: Fp8Rows, weight: Fp8, bias_X: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply by gate rows and the up rows after them [2I, D]; [T, I] in `dtype`, as gate_up.py.

    x, weight: of one form. No launch since the last synchronisation may write the weight.
    """
    launch = backend.get().fp8_gate_up or launch_fp8_gate_up
    return pick(x.codes_TK, launch, fp8_gate_up_ref)(x, weight, bias_X, dtype)


def _empty_sums(
    x: Fp8Rows, weight: Fp8, dtype: torch.dtype, first: int, whole: Whole | None = None
) -> Tensor:
    parts = num_parts(x.codes_TK, weight.codes_NK, whole)
    shape = parts, x.codes_TK.shape[0], weight.codes_NK.shape[0]
    return x.scales.new_empty(shape, dtype=dtype if parts == 1 else torch.float32)


@opaque(_empty_sums)
def _fp8_sums(
    x: Fp8Rows, weight: Fp8, dtype: torch.dtype, first: int, whole: Whole | None = None
) -> Tensor:
    if not use_triton(x.codes_TK):
        return fp8_split_linear_ref(x, weight, dtype, first, whole)
    other = backend.get().fp8_split_linear
    if other is not None:
        return other(x, weight, dtype, first)
    return launch_fp8_split_linear(x, weight, dtype, first, whole=whole)


def launch_fp8_linear(
    x: Fp8Rows,
    weight: Fp8,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """tiles: None: the fastest that are known, as everywhere but in tuning"""
    tiles = tiles or tiles_for("whole", x.codes_TK, weight.codes_NK)
    shape = len(x.codes_TK), len(weight.codes_NK)
    out_TN = torch.empty(shape, dtype=dtype, device=x.scales.device)
    _launch(out_TN, x, weight, bias_N, tiles)
    return out_TN


def launch_fp8_split_linear(
    x: Fp8Rows,
    weight: Fp8,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    tiles: Tiles | None = None,
    whole: Whole | None = None,
) -> Tensor:
    """Leave [parts, T, N]. dtype: of a sum that is all. The others: as above."""
    tiles = tiles or tiles_for("split", x.codes_TK, weight.codes_NK, whole=whole)
    if first > 0 and tiles.cuts != 0:  # persistent/ makes all columns
        tiles = tiles_for_columns(tiles, x.codes_TK, weight.codes_NK[first:])
    shape = tiles.parts, len(x.codes_TK), len(weight.codes_NK)
    dtype = dtype if tiles.parts == 1 else torch.float32
    parts_STN = torch.empty(shape, dtype=dtype, device=x.scales.device)
    _launch(parts_STN, x, weight, None, tiles, first)
    return parts_STN


def launch_fp8_gate_up(
    x: Fp8Rows,
    weight: Fp8,
    bias_X: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """tiles: as above"""
    tiles = tiles or tiles_for("gate", x.codes_TK, weight.codes_NK)
    T, I = len(x.codes_TK), len(weight.codes_NK) // 2
    out_TI = torch.empty(rows_of_tiles(T), I, dtype=dtype, device=x.scales.device)[:T]
    _launch(out_TI, x, weight, bias_X, tiles, is_gated=True)
    return out_TI


def _launch(
    out: Tensor,
    x: Fp8Rows,
    weight: Fp8,
    bias_N: Tensor | None,
    tiles: Tiles,
    first: int = 0,
    is_gated: bool = False,
) -> None:
    """Launch the kernel that is made for these tiles. out: [T, N], or [parts, T, N]."""
    T, K = x.codes_TK.shape
    N = len(weight.codes_NK) // (2 if is_gated else 1)
    assert x.is_block == weight.is_block, (x.scales.shape, weight.scales.shape)
    assert tiles.block_k == GROUP, tiles
    assert tiles.splits == 1 or K % (tiles.splits * GROUP) == 0, (K, tiles)
    scales = Scales(x.scales, weight.scales, weight.is_shared)
    if tiles.cuts != 0:
        parts_STN = out[None] if out.dim() == 2 else out
        tensors = parts_STN, x.codes_TK, weight.codes_NK, bias_N
        launch_persistent(*tensors, tiles, is_gated, scales)
        return
    if has_few_rows(x.codes_TK, tiles, is_gated):
        launch_few_rows(out, x.codes_TK, weight.codes_NK, bias_N, tiles, first, is_gated, scales)
        return
    x_desc, _ = describe_rows(x.codes_TK, tiles)
    halves = weight.codes_NK[:N], weight.codes_NK[-N:]
    w_descs = (describe(half, tiles.block_n, GROUP) for half in halves)
    bias = weight.scales if bias_N is None else bias_N
    grid = (num_tiles(N - first, T, tiles), tiles.parts)
    flags: dict[str, int] = {
        "IS_GATED": is_gated,
        "IS_BLOCK": x.is_block,
        "HAS_BIAS": bias_N is not None,
    }
    flags |= {"SPLITS": tiles.splits, "WALKED": tiles.walked}
    options: dict[str, object] = {"num_stages": tiles.num_stages, "num_warps": tiles.num_warps}
    options |= launch_options(x.codes_TK)
    options |= need()
    _fp8_kernel[grid](
        *(out, x_desc, *w_descs, x.scales, weight.scales, bias),
        *(T, N, K, x.scales.stride(0), first),
        **flags,
        **options,
    )


@jit(varying=("T", "stride_scales"))
def _fp8_kernel(
    out_ptr,  # [T, N], or [parts, T, N]; several parts in float32
    x_desc,  # [T, K] in tiles [BLOCK_M, 128]
    w_desc,  # [N, K] in tiles [BLOCK_N, 128]
    up_desc,  # the same
    x_scales_ptr,  # [T], or [K / 128, T]
    w_scales_ptr,  # [N], or [K / 128, N]; gated 2N
    bias_ptr,  # [N], or [2N]
    T,
    N,
    K,
    stride_scales,  # of x, from a group to the next
    first,  # column; those before it are left out
    IS_GATED: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    WALKED: tl.constexpr,  # of the splits, by a program
    PDL: tl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    n_tiles = tl.cdiv(N - first, BLOCK_N)
    n_tile, m_tile = place_of(tl.program_id(0), n_tiles, tl.cdiv(T, BLOCK_M))
    n0 = first + n_tile * BLOCK_N
    m0 = m_tile * BLOCK_M
    part = tl.program_id(1)
    out_ptr += part.to(tl.int64) * T * N
    wait_for_inputs(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    blocks = split_blocks(K, w_desc.block_shape[1], SPLITS)
    scales = x_scales_ptr, w_scales_ptr, w_scales_ptr + N
    sizes = T, N, stride_scales, N * (2 if IS_GATED else 1)
    total, up = sums_of(
        *((x_desc, w_desc, up_desc), scales, n0, m0, part * WALKED, blocks, sizes),
        *(IS_GATED, IS_BLOCK, WALKED),
    )
    let_the_next_start(PDL)
    if IS_GATED:
        store_gated(out_ptr, bias_ptr, total, up, n0, m0, T, N, HAS_BIAS)
    else:
        store_tile(out_ptr, bias_ptr, total, n0, m0, T, N, HAS_BIAS)


def fp8_linear_ref(x: Fp8Rows, weight: Fp8, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    return Sums(_sums_ref(x, weight)[None], bias_N).finish(dtype)


def fp8_split_linear_ref(
    x: Fp8Rows,
    weight: Fp8,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    whole: Whole | None = None,
) -> Tensor:
    """Compute all columns, as one part."""
    N, K = weight.codes_NK.shape
    return _sums_ref(x, weight, splits_of_part(N, K, whole, is_fp8=True)).to(dtype)[None]


def fp8_gate_up_ref(x: Fp8Rows, weight: Fp8, bias_X: Tensor | None, dtype: torch.dtype) -> Tensor:
    gate_TI, up_TI = fp8_linear_ref(x, weight, bias_X, torch.float32).chunk(2, dim=-1)
    return (gate_TI / (1.0 + blocked_exp(-gate_TI)) * up_TI).to(dtype)


def _sums_ref(x: Fp8Rows, weight: Fp8, splits: int = 1) -> Tensor:
    """Sum [T, N] in float32, each split's blocks of 128 in their order."""
    groups = num_groups(weight.codes_NK.shape[1])
    length = groups // splits
    parts = (_split_ref(x, weight, range(i, i + length)) for i in range(0, groups, length))
    return add_parts(torch.stack(list(parts)))


def _split_ref(x: Fp8Rows, weight: Fp8, groups: range) -> Tensor:
    T, N = len(x.codes_TK), len(weight.codes_NK)
    total_TN = x.scales.new_zeros(T, N)
    for g in groups:
        columns = slice(g * GROUP, (g + 1) * GROUP)
        part_TN = blocked_product(x.codes_TK[:, columns], weight.codes_NK[:, columns])
        if x.is_block:
            part_TN = part_TN * (weight.scales[g] * x.scales[g, :T, None])
        total_TN = total_TN + part_TN
    return total_TN if x.is_block else total_TN * x.scales[:, None] * weight.scales
