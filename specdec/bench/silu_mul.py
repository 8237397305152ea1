"""silu(gate) * up over a finished product of cuBLAS: only exactness.py needs it."""

import torch
from torch import Tensor

from specdec.kernels import jit, tl

BLOCK = 1024


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """[T, 2I] to [T, I], gate columns before up columns."""
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
    tl.store(
        out_ptr + t * I + i,
        (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty),
        mask=i < I,
    )
