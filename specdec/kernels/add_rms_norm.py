"""stream = x + residual for an unfinished product x; y = rms_norm(stream) * w.

x is rounded when it is finished, the stream when it is written; the norm reads the rounded stream.
Tried and slower: programs beside this kernel that prefetch the next product's weights into L2.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.add import finished
from specdec.kernels.kept import store_kept
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import let_the_next_start, loaded_before, wait_for_inputs
from specdec.kernels.rms_norm import NORM_WARPS, normed, rms_norm_ref
from specdec.kernels.tiles import empty_rows


@opaque(lambda x, residual, *_: (torch.empty_like(residual), torch.empty_like(residual)), "tap_TD")
def add_rms_norm(
    x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm and the stream, both [T, D] in the residual's dtype.

    x:      an unfinished product [T, D]; its launch is later than what writes the residual
    tap_TD: receives the stream too (columns of a wider buffer)
    """
    norm = pick(residual_TD, launch_add_rms_norm, add_rms_norm_ref)
    return norm(x, residual_TD, weight_D, eps, tap_TD)


def launch_add_rms_norm(
    x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert residual_TD.stride(1) == 1, residual_TD.stride()
    assert x.parts_STN.is_contiguous(), x.parts_STN.stride()
    S, T, D = x.parts_STN.shape
    out_TD = empty_rows(residual_TD, T, D)
    stream_TD = empty_rows(residual_TD, T, D)
    _add_rms_norm_kernel[(T,)](
        out_TD,
        stream_TD,
        stream_TD if tap_TD is None else tap_TD,
        x.parts_STN,
        weight_D if x.bias_N is None else x.bias_N,
        residual_TD,
        weight_D,
        residual_TD.stride(0),
        0 if tap_TD is None else tap_TD.stride(0),
        T,
        D,
        eps,
        HAS_BIAS=x.bias_N is not None,
        HAS_TAP=tap_TD is not None,
        SPLITS=S,
        BLOCK_D=next_power_of_2(D),
        num_warps=NORM_WARPS,
        **launch_options(residual_TD),
    )
    return out_TD, stream_TD


@jit
def _add_rms_norm_kernel(
    out_ptr,  # [T, D]
    stream_ptr,  # [T, D]
    tap_ptr,  # [T, D], with HAS_TAP
    parts_ptr,  # [SPLITS, T, D] float32, or rounded
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
):
    let_the_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    w = loaded_before(tl.load(w_ptr + d, mask=inside, other=0.0), PDL)
    at = residual_ptr + t * stride_residual + d
    residual = loaded_before(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), PDL)
    wait_for_inputs(PDL)
    dtype = out_ptr.dtype.element_ty
    x = finished(parts_ptr, bias_ptr, t, d, T, D, HAS_BIAS, SPLITS).to(dtype).to(tl.float32)
    stream = (x + residual).to(dtype)
    store_kept(stream_ptr + t * D + d, stream, inside)
    if HAS_TAP:
        store_kept(tap_ptr + t * stride_tap + d, stream, inside)
    store_kept(out_ptr + t * D + d, normed(stream.to(tl.float32), w, D, eps).to(dtype), inside)


def add_rms_norm_ref(
    x: Sums, residual_TD: Tensor, weight_D: Tensor, eps: float, tap_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    stream_TD = x.finish(residual_TD.dtype) + residual_TD
    if tap_TD is not None:
        tap_TD.copy_(stream_TD)
    return rms_norm_ref(stream_TD, weight_D, eps), stream_TD
