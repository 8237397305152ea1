"""MXFP4 weights for tests, drawn, and their numbers by the format's own words."""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def drawn(*shape: int, device: str = "cpu", around: int = 124) -> tuple[Tensor, Tensor]:
    """Draw blocks [..., K / 32, 16] and scales [..., K / 32] of weights of this shape."""
    *rows, K = shape
    blocks = torch.randint(256, (*rows, K // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(around - 3, around, (*rows, K // 32), device=device)
    return blocks, scales.to(torch.uint8)


def numbers_of(blocks: Tensor, scales: Tensor) -> Tensor:
    """Make the weights [..., K] of blocks and scales, in float64."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device).double()
    numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1)
    return (numbers.flatten(-2) * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)
