"""Codes of rows: s = max(largest of |x|, 1e-10) / 448, code = e4m3(x / s), in float32.

The largest is of a row (channel form) or of each 128 of its columns (block form). Where ranks have
columns of one row each, `row_peaks` finds the largest of these. Both divisions are true ones, and a
code is the nearest, of two the even one: codes of kernel and twin are equal. A NaN has the code of
NaN, and does not count for s; infinity makes s infinite, and has a NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.fp8.weight import (
    ALIGNED,
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

CHUNK = 4096  # columns of a program, where one has not the whole row
FEW_ROWS = 64  # up to which programs may read a row each, to find its largest


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
    """Quantise on a GPU: a program for some columns of a row, of few or of groups, or for all."""
    assert x_TK.stride(1) == 1, x_TK.stride()
    T, K = x_TK.shape
    rows = room_for_codes(T, K, is_block, x_TK.device)
    width = row_width(K)
    is_cut = is_block or peaks_T is not None or T <= FEW_ROWS
    block_k = min(width, CHUNK) if is_cut else width
    options = {"BLOCK_K": block_k, "ROW_K": width, "IS_BLOCK": is_block}
    options |= {"num_warps": 8 if block_k <= CHUNK else 16} | launch_options(x_TK)
    stride = rows.scales.stride(0) if is_block else 0
    given = x_TK, x_TK.stride(0), stride, K
    _quantise_kernel[(T, -(-K // block_k))](*rows, *given, **options, peaks_ptr=peaks_T)
    return rows


def row_width(K: int) -> int:
    """Give the width of a row in registers, whole groups of columns."""
    return max(next_power_of_2(K), GROUP)


@jit(varying=("stride_scales",))
def _quantise_kernel(
    codes_ptr,  # [T, K]
    scales_ptr,  # [T], or [K / 128, T]
    x_ptr,  # [T, K]
    stride_x,
    stride_scales,  # from a group to the next
    K,
    BLOCK_K: tl.constexpr,
    ROW_K: tl.constexpr,  # columns of the row whose largest each program finds
    IS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    peaks_ptr=None,  # [T]
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_K
    x = _row(x_ptr + t * stride_x, first, K, BLOCK_K)
    if IS_BLOCK:
        peak = None
    elif peaks_ptr is not None:
        peak = tl.load(peaks_ptr + t)
    elif ROW_K > BLOCK_K:
        peak = _peak(_row(x_ptr + t * stride_x, 0, K, ROW_K))
    else:
        peak = None
    store_codes(codes_ptr, scales_ptr, x, t, first, K, stride_scales, IS_BLOCK, peak)


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
    tl.store(peaks_ptr + t, _peak(_row(x_ptr + t * stride_x, 0, K, BLOCK_K)))


@jit
def _row(at, first, K, WIDTH: tl.constexpr):
    """Load columns of a row from `first` on, as float32; zeros after the last."""
    k = first + tl.arange(0, WIDTH)
    return tl.load(at + k, mask=k < K, other=0.0).to(tl.float32)


@jit
def _peak(x):
    """Find the largest of |x| along the last axis; a NaN does not count, as in tl.max."""
    peak = tl.max(tl.abs(x), axis=len(x.shape) - 1)
    return tl.where(peak == peak, peak, 0.0)  # of nothing but NaN


@jit
def store_codes(
    codes_ptr,
    scales_ptr,
    x,
    t,
    first,
    K,
    stride_scales,
    IS_BLOCK: tl.constexpr,
    peak=None,
):
    """Store codes and scales of columns of row t, from a multiple of 128 on.

    x: float32, with zeros after the row's K elements. peak: of the row; None: of x, or its groups
    """
    GROUPS: tl.constexpr = x.shape[0] // 128 if IS_BLOCK else 1
    WIDTH: tl.constexpr = x.shape[0] // GROUPS
    g = tl.arange(0, GROUPS)
    k = first + g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.reshape(x, [GROUPS, WIDTH])
    if peak is None:
        peak = _peak(x)
    scale = tl.div_rn(tl.maximum(peak, 1e-10), 448.0)
    scale = tl.broadcast_to(scale, [GROUPS])
    store_kept(codes_ptr + t * K + k, _codes(_quotient(x, scale[:, None])), k < K)
    first_group = first // 128 if IS_BLOCK else 0
    has_group = first + g * WIDTH < K
    store_kept(scales_ptr + (first_group + g) * stride_scales + t, scale, has_group)


@jit
def _quotient(x, scale):
    """Divide as a true division, with its reciprocal and two corrections (Markstein 1990).

    Those of an infinite scale would be NaN where the quotient is 0.
    """
    if IS_COMPILED:
        reciprocal = tl.div_rn(1.0, scale)
        scale = tl.where(scale == float("inf"), 0.0, scale)
        found = x * reciprocal
        found = tl.fma(tl.fma(-found, scale, x), reciprocal, found)
        found = tl.fma(tl.fma(-found, scale, x), reciprocal, found)
        return tl.where(x == 0.0, x, found)  # with its sign
    else:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


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
    return Fp8Rows(codes_TK, F.pad(scales_TG.t(), (0, -T % ALIGNED)).contiguous())


def row_peaks_ref(x: Tensor) -> Tensor:
    return x.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
