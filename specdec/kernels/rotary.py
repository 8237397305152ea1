"""Rotary position embedding in the half-split layout: pair i is (x[i], x[i + C/2]); float32 inside, rounded once."""

import torch
from torch import Tensor


def rotary(x_THC: Tensor, positions_T: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
    """Rotate every head of a row to its position. cos, sin: [positions, C/2] float32. Returns x's shape and dtype."""
    return rotary_ref(x_THC, positions_T, cos_PC, sin_PC)


def rotary_ref(x_THC: Tensor, positions_T: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
    cos, sin = cos_PC[positions_T].unsqueeze(1), sin_PC[positions_T].unsqueeze(1)
    first, second = x_THC.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THC.dtype)
