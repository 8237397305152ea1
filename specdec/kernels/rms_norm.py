"""y = x / sqrt(mean(x^2) + eps) * w, after an optional residual addition; float32 inside, rounded once.

The residual stream is rounded when it is written (x + residual), and the norm reads the rounded stream, so that the
fused and the separate form give the same bits.
"""

import torch
from torch import Tensor

from specdec.kernels.invariant import tree_sum


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension. Returns the norm of (x + residual), and that sum, both in x's dtype."""
    return rms_norm_ref(x_TD, weight_D, eps, residual_TD)


def rms_norm_ref(
    x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    stream_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = stream_TD.float()
    mean_T1 = tree_sum(wide_TD * wide_TD) / wide_TD.shape[-1]
    return (wide_TD * (1.0 / torch.sqrt(mean_T1 + eps)) * weight_D.float()).to(x_TD.dtype), stream_TD
