"""What a round or a chunk computes with in place of our kernels: cuBLAS, and others' attention.

Products come from cuBLAS, whose sums change with the number of rows, rounded to the model's dtype
as soon as they may be; attention comes from a yardstick (contiguous_attention.py). The engine and
all its other kernels stay what they are.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.bench.attention_jobs import Job
from specdec.bench.contiguous_attention import ContiguousAttention
from specdec.bench.yardsticks import yardsticks
from specdec.kernels import jit, tl
from specdec.kernels.backend import Backend, using

BLOCK = 1024  # of silu_mul


@contextmanager
def exchanged(names: Sequence[str], job: Job, device: torch.device) -> Iterator[None]:
    """Let others compute these products in the body, and attention by the yardstick of a name.

    job: what attention computes in each layer
    """
    with using(backend_of(names, job, device)):
        yield


def backend_of(names: Sequence[str], job: Job, device: torch.device) -> Backend:
    """Say who computes what. names: "layers", "heads", or a yardstick's."""
    chosen = Backend()
    for name in names:
        if name == "layers":
            chosen = replace(
                chosen,
                linear=cublas_linear,
                split_linear=cublas_sums,
                gate_up=cublas_gate_up,
            )
        elif name == "heads":
            chosen = replace(chosen, tile_maxima=cublas_tile_maxima)
        else:
            attend = ContiguousAttention(yardsticks(device)[name], job)
            chosen = replace(chosen, attend=attend)
    return chosen


def cublas_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype == x_TK.dtype:
        return F.linear(x_TK, weight_NK, bias_N)
    out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=out_dtype)
    return out_TN if bias_N is None else out_TN + bias_N


def cublas_sums(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Make all columns: `first` says which may be left out."""
    return torch.mm(x_TK, weight_NK.t(), out_dtype=dtype)[None]


def cublas_gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    return silu_mul(F.linear(x_TD, weight_XD, bias_X))


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """Compute silu(gate) * up, [T, 2I] to [T, I]: gate columns come before up columns."""
    T, X = gate_up_TX.shape
    out_TI = torch.empty(T, X // 2, dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    _silu_mul_kernel[(T, -(-X // 2 // BLOCK))](out_TI, gate_up_TX, X // 2, BLOCK=BLOCK)
    return out_TI


@jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(out_ptr, gate_up_ptr, I, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + t * I + i, y.to(out_ptr.dtype.element_ty), mask=i < I)


def cublas_tile_maxima(x_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best of each part of the vocabulary, for the second kernel of best_token.py."""
    logits_TV = F.linear(x_TD, weight_VD)
    parts = math.gcd(len(weight_VD), 256)
    best_TP, ids_TP = logits_TV.view(len(x_TD), parts, -1).max(dim=-1)
    first_P = torch.arange(parts, device=x_TD.device) * (len(weight_VD) // parts)
    return best_TP.t().float().contiguous(), (ids_TP + first_P).t().to(torch.int32).contiguous()
