"""out = x + residual for an unfinished product x, rounded as add_rms_norm rounds."""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.linear import Sums
from specdec.kernels.opaque import opaque
from specdec.kernels.overlap import begin


@opaque(writes="out_TD")
def add(x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
    """x: an unfinished product [T, D]; out_TD is overwritten and has the residual's dtype."""
    pick(residual_TD, launch_add, add_ref)(x, residual_TD, out_TD)


def launch_add(x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
    S, T, D = x.parts_STN.shape
    _add_kernel[(T,)](
        out_TD,
        x.parts_STN,
        x.parts_STN if x.bias_N is None else x.bias_N,
        residual_TD,
        out_TD.stride(0),
        residual_TD.stride(0),
        T,
        D,
        HAS_BIAS=x.bias_N is not None,
        SPLITS=S,
        BLOCK_D=next_power_of_2(D),
        num_warps=8,
        **launch_options(residual_TD),
    )


@jit
def _add_kernel(
    out_ptr,  # [T, D]
    parts_ptr,  # [SPLITS, T, D] float32, or rounded
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
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dtype = out_ptr.dtype.element_ty
    x = finished(parts_ptr, bias_ptr, t, d, T, D, HAS_BIAS, SPLITS).to(dtype).to(tl.float32)
    residual = tl.load(residual_ptr + t * stride_residual + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_out + d, (x + residual).to(dtype), mask=d < D)


@jit
def finished(parts_ptr, bias_ptr, t, d, T, D, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr):
    """Finish one row of an unfinished product, float32: add the splits in order, then the bias."""
    x = tl.load(parts_ptr + t * D + d, mask=d < D, other=0.0)
    for i in tl.static_range(1, SPLITS):
        x += tl.load(parts_ptr + (i * T + t) * D + d, mask=d < D, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    return x


def add_ref(x: Sums, residual_TD: Tensor, out_TD: Tensor) -> None:
    out_TD.copy_(x.finish(residual_TD.dtype) + residual_TD)
