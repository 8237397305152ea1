"""log(sum(exp(x))) of each row, by one order of the sum for any number of rows.

torch.logsumexp cuts a row into as many parts as there are few rows, so that the logprobs of a token
would depend on who shares its step.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.overlap import begin

BLOCK = 4096  # columns at a time; with the warps it decides the order of the sum
NUM_WARPS = 8


def log_sum_exp(x_TV: Tensor) -> Tensor:
    """Returns [T] float32. x_TV: float32."""
    if not use_triton(x_TV):
        return log_sum_exp_ref(x_TV)
    assert x_TV.stride(1) == 1, x_TV.stride()
    T, V = x_TV.shape
    out_T = torch.empty(T, dtype=torch.float32, device=x_TV.device)
    options = {"BLOCK": BLOCK, "num_warps": NUM_WARPS} | launch_options(x_TV)
    _log_sum_exp_kernel[(T,)](out_T, x_TV, x_TV.stride(0), V, **options)
    return out_T


@jit(varying=("x_ptr",))
def _log_sum_exp_kernel(
    out_ptr,  # [T]
    x_ptr,  # [T, V]
    stride_x,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + t * stride_x + start + v, mask=start + v < V, other=float("-inf"))
        most = tl.maximum(most, x)
    top = tl.max(most, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + t * stride_x + start + v, mask=start + v < V, other=float("-inf"))
        total += tl.exp(x - top)
    tl.store(out_ptr + t, top + tl.log(tl.sum(total, axis=0)))


def log_sum_exp_ref(x_TV: Tensor) -> Tensor:
    return x_TV.logsumexp(dim=-1)
