"""Codes of rows: s = max(largest of |x|, 1e-10) / 448, code = e4m3(x / s), in float32.

The largest is of a row (channel form) or of each 128 of its columns (block form). Where ranks have
columns of one row each, `row_peaks` finds the largest of these. Both divisions
are true ones, and a code is the nearest, of two the even one: codes of kernel and twin are equal.
A NaN has the code of NaN, and does not count for s; infinity makes s infinite, and has a NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.fp8.weight import (
    E4M3,
    GROUP,
    LARGEST,
    LEAST_PEAK,
    Fp8Rows,
    num_groups,
    scales_shape,
)
from specdec.kernels.kept import store_kept
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin
from specdec.kernels.sum_order import IS_COMPILED
from specdec.kernels.tile_shapes import rows_of_tiles

WIDE = 8192  # columns of a row for which a program has more warps


def quantise(x_TK: Tensor, is_block: bool, peaks_T: Tensor | None = None) -> Fp8Rows:
    """Quantise rows [T, K] of any float dtype, each by itself; see the module for the formula.

    is_block: scales of each 128 columns, the last of which may be fewer; else of a row
    peaks_T:  the largest of |x| of whole rows, float32, of which x has some columns; None: all
    """
    assert peaks_T is None or not is_block, "a rank has whole groups"
    return Fp8Rows(*_quantise(x_TK, is_block, peaks_T))


@opaque(lambda x: x.new_empty(x.shape[0], dtype=torch.float32))
def row_peaks(x_TK: Tensor) -> Tensor:
    """Find the largest of |x| in each row, [T] float32; a NaN does not count."""
    if not use_triton(x_TK):
        return row_peaks_ref(x_TK)
    assert x_TK.stride(1) == 1, x_TK.stride()
    T, K = x_TK.shape
    peaks_T = torch.empty(T, dtype=torch.float32, device=x_TK.device)
    options = {"BLOCK_K": row_width(K), "num_warps": 8} | launch_options(x_TK)
    _row_peaks_kernel[(T,)](peaks_T, x_TK, x_TK.stride(0), K, **options)
    return peaks_T


def empty_codes(x_TK: Tensor, is_block: bool) -> tuple[Tensor, Tensor]:
    """Give codes and scales as results of `quantise` to torch.compile, empty."""
    T, K = x_TK.shape
    codes_TK = torch.empty(T, K, dtype=E4M3, device=x_TK.device)
    scales = x_TK.new_empty(scales_shape(T, K, is_block), dtype=torch.float32)
    return codes_TK, scales


def room_for_codes(T: int, K: int, is_block: bool, device: torch.device) -> Fp8Rows:
    """Allocate codes [T, K], in memory up to the end of the last tile, and scales."""
    codes_TK = torch.empty(rows_of_tiles(T), K, dtype=E4M3, device=device)[:T]
    scales = torch.empty(scales_shape(T, K, is_block), dtype=torch.float32, device=device)
    return Fp8Rows(codes_TK, scales)


@opaque(lambda x, is_block, peaks: empty_codes(x, is_block))
def _quantise(x_TK: Tensor, is_block: bool, peaks_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if not use_triton(x_TK):
        return quantise_ref(x_TK, is_block, peaks_T)
    return launch_quantise(x_TK, is_block, peaks_T)


def launch_quantise(x_TK: Tensor, is_block: bool, peaks_T: Tensor | None = None) -> Fp8Rows:
    """Quantise on a GPU, one program a row."""
    assert x_TK.stride(1) == 1, x_TK.stride()
    T, K = x_TK.shape
    rows = room_for_codes(T, K, is_block, x_TK.device)
    stride = rows.scales.stride(0) if is_block else 0
    options = {"BLOCK_K": row_width(K), "IS_BLOCK": is_block, "num_warps": 8 if K <= WIDE else 16}
    options |= launch_options(x_TK)
    given = x_TK, x_TK.stride(0), stride, K
    _quantise_kernel[(T,)](*rows, *given, **options, peaks_ptr=peaks_T)
    return rows


def row_width(K: int) -> int:
    """Give the width of a row in registers, whole groups of columns."""
    return max(next_power_of_2(K), GROUP)


@jit
def _quantise_kernel(
    codes_ptr,  # [T, K]
    scales_ptr,  # [T], or [K / 128, T]
    x_ptr,  # [T, K]
    stride_x,
    stride_scales,  # from a group to the next
    K,
    BLOCK_K: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    peaks_ptr=None,  # [T]
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + t * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    store_codes(codes_ptr, scales_ptr, x, t, K, stride_scales, IS_BLOCK, peaks_ptr)


@jit
def _row_peaks_kernel(
    peaks_ptr,  # [T]
    x_ptr,  # [T, K]
    stride_x,
    K,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + t * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(peaks_ptr + t, tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0))


@jit
def store_codes(
    codes_ptr, scales_ptr, x, t, K, stride_scales, IS_BLOCK: tl.constexpr, peaks_ptr=None
):
    """Store codes and scales of row t. x: float32, with zeros after its K elements.

    peaks: of whole rows, whose columns x are; None: they are all
    """
    GROUPS: tl.constexpr = x.shape[0] // 128 if IS_BLOCK else 1
    WIDTH: tl.constexpr = x.shape[0] // GROUPS
    g = tl.arange(0, GROUPS)
    k = g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.reshape(x, [GROUPS, WIDTH])
    if peaks_ptr is None:
        peak = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    else:
        peak = tl.load(peaks_ptr + t + g)  # of the one group that there is
    scale = tl.div_rn(tl.maximum(peak, 1e-10), 448.0)
    codes = _codes(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    store_kept(codes_ptr + t * K + k, codes, k < K)
    store_kept(scales_ptr + g * stride_scales + t, scale, g * WIDTH < K)


@jit
def _codes(x):
    """Round to the nearest of e4m3, of two to the even one, up to 448."""
    if IS_COMPILED:
        return x.to(tl.float8e4nv)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        whole = tl.abs(x) * 512.0 + 8388608.0  # which rounds to whole numbers
        code = tl.where(size < 0x3C800000, (whole - 8388608.0).to(tl.int32), normal)
        code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


def quantise_ref(x_TK: Tensor, is_block: bool, peaks_T: Tensor | None = None) -> Fp8Rows:
    T, K = x_TK.shape
    width = GROUP if is_block else K
    groups = num_groups(K) if is_block else 1
    x_TGX = F.pad(x_TK.float(), (0, groups * width - K)).view(T, groups, width)
    peaks_TG = row_peaks_ref(x_TGX) if peaks_T is None else peaks_T[:, None]
    scales_TG = peaks_TG.clamp(min=LEAST_PEAK) / peaks_TG.new_full((), LARGEST)
    codes_TGX = (x_TGX / scales_TG[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    codes_TK = codes_TGX.view(T, groups * width)[:, :K].contiguous()
    if not is_block:
        return Fp8Rows(codes_TK, scales_TG[:, 0].contiguous())
    return Fp8Rows(codes_TK, F.pad(scales_TG.t(), (0, -T % 4)).contiguous())


def row_peaks_ref(x: Tensor) -> Tensor:
    return x.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
