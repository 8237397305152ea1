"""SwiGLU: y = gate * sigmoid(gate) * up, from one [T, 2I] product; float32 inside, rounded once."""

from torch import Tensor

from specdec.kernels.invariant import blocked_exp


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """gate_up_TX: gate in the first half of the columns, up in the second. Returns [T, I]."""
    return silu_mul_ref(gate_up_TX)


def silu_mul_ref(gate_up_TX: Tensor) -> Tensor:
    gate, up = gate_up_TX.float().chunk(2, dim=-1)
    return (gate / (1.0 + blocked_exp(-gate)) * up).to(gate_up_TX.dtype)
