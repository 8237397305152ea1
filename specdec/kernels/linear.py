"""y = x W^T + b, with one order of the reduction over K for every number of rows.

A row's result depends on the row and the weight only. The product accumulates in float32, the bias is added there,
and the sum is rounded once, to `out_dtype`.
"""

import torch
from torch import Tensor

from specdec.kernels.invariant import blocked_product


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The row-invariant product. Returns [T, N] in `out_dtype` (default: x's dtype)."""
    return linear_ref(x_TK, weight_NK, bias_N, out_dtype)


def linear_ref(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    out_TN = blocked_product(x_TK, weight_NK)
    if bias_N is not None:
        out_TN = out_TN + bias_N.float()
    return out_TN.to(out_dtype or x_TK.dtype)
