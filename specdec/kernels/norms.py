"""RMSNorm and the residual stream: each alone, and both at once.

rms_norm: y = x / sqrt(mean(x^2) + eps) * w over the last dimension; float32 inside, rounded once.
add_rms_norm: stream = x + residual for an unfinished product x; y = rms_norm(stream). x is rounded
when it is finished, the stream when it is written; the norm reads the rounded stream. A product
with a factor (Sums) is multiplied by it in between, in float32.
add: the stream alone, rounded as there.
Tried and slower: programs beside add_rms_norm that prefetch the next product's weights into L2.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.fp8.quantise import row_width, store_codes
from specdec.kernels.invariant import tree_sum
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin, let_the_next_start, loaded_before, wait_for_inputs
from specdec.kernels.sum_order import added
from specdec.kernels.tiles import empty_rows

NORM_WARPS = 8  # one number for all norms: it decides the order of their sums


@opaque(lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Returns [T, D] in x's dtype."""
    if not use_triton(x_TD):
        return rms_norm_ref(x_TD, weight_D, eps)
    out_TD = empty_rows(x_TD, *x_TD.shape)
    launch_rms_norm(out_TD, None, x_TD, weight_D, eps)
    return out_TD


def launch_rms_norm(
    out_TD: Tensor, scales: Tensor | None, x_TD: Tensor, weight_D: Tensor, eps: float
) -> None:
    """Write rows to `out_TD`, or with scales their codes, as fp8/quantise.py makes them."""
    assert x_TD.stride(1) == 1, x_TD.stride()
    T, D = x_TD.shape
    options = _width(D, scales) | {"num_warps": NORM_WARPS} | launch_options(x_TD)
    _rms_norm_kernel[(T,)](out_TD, x_TD, weight_D, x_TD.stride(0), D, eps, **options)


def _width(D: int, scales: Tensor | None) -> dict[str, object]:
    """Give the constants of a kernel for rows [T, D], or for their codes with these scales."""
    if scales is None:
        return {"BLOCK_D": next_power_of_2(D)}
    is_block = scales.dim() == 2
    stride = scales.stride(0) if is_block else 0
    of_codes = {"scales_ptr": scales, "stride_scales": stride, "IS_BLOCK": is_block}
    return {"BLOCK_D": row_width(D)} | of_codes


@jit(varying=("stride_scales",))
def _rms_norm_kernel(
    out_ptr,  # [T, D], or its codes
    x_ptr,  # [T, D]
    w_ptr,  # [D]
    stride_x,
    D,
    eps,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    scales_ptr=None,  # of codes
    stride_scales=0,  # from a group to the next
    IS_BLOCK: tl.constexpr = False,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = normed(x, w, D, eps).to(x_ptr.dtype.element_ty)
    if scales_ptr is None:
        store_kept(out_ptr + t * D + d, y, d < D)
    else:
        store_codes(out_ptr, scales_ptr, y.to(tl.float32), t, 0, D, stride_scales, IS_BLOCK)


@jit
def normed(x, w, D, eps):
    """Norm one row, with zeros after its D elements; all float32."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)) * w


def rms_norm_ref(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.float()
    mean_T1 = tree_sum(wide_TD * wide_TD) / wide_TD.shape[-1]
    return (wide_TD * (1.0 / torch.sqrt(mean_T1 + eps)) * weight_D.float()).to(x_TD.dtype)


@opaque(lambda x, residual, *_: (torch.empty_like(residual), torch.empty_like(residual)), "tap_TD")
def add_rms_norm(
    x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm and the stream, both [T, D] in the residual's dtype.

    x:      an unfinished product [T, D]; its launch is later than what writes the residual
    tap_TD: receives the stream too (columns of a wider buffer)
    """
    if not use_triton(residual_TD):
        return add_rms_norm_ref(x, residual_TD, weight_D, eps, tap_TD)
    out_TD = empty_rows(residual_TD, *x.parts_STN.shape[1:])
    return out_TD, launch_add_rms_norm(out_TD, None, x, residual_TD, weight_D, eps, tap_TD)


def launch_add_rms_norm(
    out_TD: Tensor,
    scales: Tensor | None,
    x: Sums,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    tap_TD: Tensor | None,
    plain_TD: Tensor | None = None,
) -> Tensor:
    """Write normed rows, or with scales their codes, to `out_TD`; returns the stream.

    plain_TD: beside codes receives the rows too
    """
    assert residual_TD.stride(1) == 1, residual_TD.stride()
    assert x.parts_STN.is_contiguous(), x.parts_STN.stride()
    _, T, D = x.parts_STN.shape
    stream_TD = empty_rows(residual_TD, T, D)
    outs = (out_TD, stream_TD, stream_TD if tap_TD is None else tap_TD)
    bias = weight_D if x.bias_N is None else x.bias_N
    strides = (residual_TD.stride(0), 0 if tap_TD is None else tap_TD.stride(0))
    flags = {"HAS_BIAS": x.bias_N is not None, "HAS_TAP": tap_TD is not None}
    options = _width(D, scales) | {"num_warps": NORM_WARPS} | launch_options(residual_TD)
    _add_rms_norm_kernel[(T,)](
        *outs,
        *(x.parts_STN, bias, residual_TD, weight_D, *strides, T, D, eps),
        FACTOR=x.factor,
        **flags,
        **options,
        **_terms(x),
        plain_ptr=plain_TD,
    )
    return stream_TD


def _terms(x: Sums) -> dict[str, Tensor | int | None]:
    """Give arguments of kernels that add parts: their number, weights and places, or None."""
    weights_TS, places_TS = x.weights_TS, x.places_TS
    assert weights_TS is None or (x.bias_N is None and weights_TS.is_contiguous())
    assert places_TS is None or (weights_TS is not None and places_TS.is_contiguous())
    terms = len(x.parts_STN) if weights_TS is None else weights_TS.shape[1]
    return {"SPLITS": terms, "weights_ptr": weights_TS, "places_ptr": places_TS}


@jit(varying=("stride_scales",))
def _add_rms_norm_kernel(
    out_ptr,  # [T, D], or its codes
    stream_ptr,  # [T, D]
    tap_ptr,  # [T, D], with HAS_TAP
    parts_ptr,  # [SPLITS, T, D] float32, or rounded; more with places
    bias_ptr,  # [D]
    residual_ptr,  # [T, D]
    w_ptr,  # [D]
    stride_residual,
    stride_tap,
    T,
    D,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_TAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    weights_ptr=None,  # [T, SPLITS] float32, of experts
    FACTOR: tl.constexpr = 1.0,
    places_ptr=None,  # [T, SPLITS]
    scales_ptr=None,  # of codes
    stride_scales=0,  # from a group to the next
    IS_BLOCK: tl.constexpr = False,
    plain_ptr=None,  # [T, D], beside codes
):
    let_the_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    w = loaded_before(tl.load(w_ptr + d, mask=inside, other=0.0), PDL)
    at = residual_ptr + t * stride_residual + d
    residual = loaded_before(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), PDL)
    wait_for_inputs(PDL)
    dtype = stream_ptr.dtype.element_ty
    x = finished(parts_ptr, bias_ptr, t, d, T, D, HAS_BIAS, SPLITS, weights_ptr, places_ptr)
    x = x.to(dtype).to(tl.float32)
    if FACTOR != 1.0:
        x = x * FACTOR
    stream = (x + residual).to(dtype)
    store_kept(stream_ptr + t * D + d, stream, inside)
    if HAS_TAP:
        store_kept(tap_ptr + t * stride_tap + d, stream, inside)
    y = normed(stream.to(tl.float32), w, D, eps).to(dtype)
    if scales_ptr is None:
        store_kept(out_ptr + t * D + d, y, inside)
    else:
        if plain_ptr is not None:
            store_kept(plain_ptr + t * D + d, y, inside)
        store_codes(out_ptr, scales_ptr, y.to(tl.float32), t, 0, D, stride_scales, IS_BLOCK)


def add_rms_norm_ref(
    x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x_TD = x.finish(residual_TD.dtype)
    if x.factor != 1.0:
        x_TD = x_TD.float() * x.factor
    stream_TD = (x_TD + residual_TD).to(residual_TD.dtype)
    if tap_TD is not None:
        tap_TD.copy_(stream_TD)
    return rms_norm_ref(stream_TD, weight_D, eps), stream_TD


@opaque(writes="out_TD")
def add(x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
    """x: an unfinished product [T, D]; out_TD is overwritten and has the residual's dtype."""
    assert x.factor == 1.0, x.factor
    if not use_triton(residual_TD):
        return add_ref(x, residual_TD, out_TD)
    _, T, D = x.parts_STN.shape
    bias = x.parts_STN if x.bias_N is None else x.bias_N
    strides = (out_TD.stride(0), residual_TD.stride(0))
    flags = {"HAS_BIAS": x.bias_N is not None, "BLOCK_D": next_power_of_2(D)}
    options = {"num_warps": NORM_WARPS} | launch_options(residual_TD)
    tensors = (out_TD, x.parts_STN, bias, residual_TD)
    _add_kernel[(T,)](*tensors, *strides, T, D, **flags, **options, **_terms(x))


@jit
def _add_kernel(
    out_ptr,  # [T, D]
    parts_ptr,  # [SPLITS, T, D] float32, or rounded; more with places
    bias_ptr,  # [D]
    residual_ptr,  # [T, D]
    stride_out,
    stride_residual,
    T,
    D,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    weights_ptr=None,  # [T, SPLITS] float32, of experts
    places_ptr=None,  # [T, SPLITS]
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dtype = out_ptr.dtype.element_ty
    x = finished(parts_ptr, bias_ptr, t, d, T, D, HAS_BIAS, SPLITS, weights_ptr, places_ptr)
    x = x.to(dtype).to(tl.float32)
    residual = tl.load(residual_ptr + t * stride_residual + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_out + d, (x + residual).to(dtype), mask=d < D)


@jit
def finished(
    parts_ptr,
    bias_ptr,
    t,
    d,
    T,
    D,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    weights_ptr=None,
    places_ptr=None,
):
    """Finish one row of an unfinished product, float32: add its parts, then the bias."""
    if weights_ptr is not None:
        x = weighted(parts_ptr, weights_ptr, places_ptr, t, d, T, D, SPLITS)
    else:
        x = added(parts_ptr, t, T, D, d, d < D, 0.0, SPLITS)
    if HAS_BIAS:
        x += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    return x


@jit
def weighted(parts_ptr, weights_ptr, places_ptr, t, d, T, D, SPLITS: tl.constexpr):
    """Add the weighted parts of one row in order; those of weight 0 may be anything."""
    x = tl.zeros(d.shape, tl.float32)
    for i in tl.static_range(SPLITS):
        weight = tl.load(weights_ptr + t * SPLITS + i)
        at = i
        if places_ptr is not None:
            at = tl.load(places_ptr + t * SPLITS + i)
        part = tl.load(parts_ptr + (at * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = tl.fma(tl.where(weight != 0, part, 0.0), weight, x)
    return x


def add_ref(x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
    out_TD.copy_(x.finish(residual_TD.dtype) + residual_TD)
