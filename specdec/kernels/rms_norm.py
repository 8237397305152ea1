"""y = x / sqrt(mean(x^2) + eps) * w over the last dimension; float32 inside, rounded once."""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.invariant import tree_sum
from specdec.kernels.kept import store_kept
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin
from specdec.kernels.tiles import empty_rows

NORM_WARPS = 8  # one number for all norms: it decides the order of their sums


@opaque(lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Returns [T, D] in x's dtype."""
    return pick(x_TD, launch_rms_norm, rms_norm_ref)(x_TD, weight_D, eps)


def launch_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    assert x_TD.stride(1) == 1, x_TD.stride()
    T, D = x_TD.shape
    out_TD = empty_rows(x_TD, T, D)
    _rms_norm_kernel[(T,)](
        out_TD,
        x_TD,
        weight_D,
        x_TD.stride(0),
        D,
        eps,
        BLOCK_D=next_power_of_2(D),
        num_warps=NORM_WARPS,
        **launch_options(x_TD),
    )
    return out_TD


@jit
def _rms_norm_kernel(
    out_ptr,  # [T, D]
    x_ptr,  # [T, D]
    w_ptr,  # [D]
    stride_x,
    D,
    eps,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    store_kept(out_ptr + t * D + d, normed(x, w, D, eps).to(out_ptr.dtype.element_ty), d < D)


@jit
def normed(x, w, D, eps):
    """Norm one row, with zeros after its D elements; all float32."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)) * w


def rms_norm_ref(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.float()
    mean_T1 = tree_sum(wide_TD * wide_TD) / wide_TD.shape[-1]
    return (wide_TD * (1.0 / torch.sqrt(mean_T1 + eps)) * weight_D.float()).to(x_TD.dtype)
