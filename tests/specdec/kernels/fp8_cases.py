"""Weights of 8 bits for tests, and their products in float64."""

import torch

from specdec.kernels.experts.weight import Weight
from specdec.kernels.fp8.weight import E4M3, GROUP, LARGEST, Fp8, Fp8Rows, num_groups


def fp8_weight(N, K, is_block, device="cpu"):
    """Draw a weight whose numbers are about K ** -0.5."""
    codes = (torch.randn(N, K, device=device) * 80).clamp(-LARGEST, LARGEST).to(E4M3)
    shape = (num_groups(K), N) if is_block else (N,)
    return Fp8(codes, (torch.rand(shape, device=device) + 0.5) / 80 / K**0.5)


def fp8_experts(E, D, I, is_block, device="cpu"):
    """Draw gate_up [E, 2I, D] and down [E, D, I]."""
    found = []
    for N, K in ((2 * I, D), (D, I)):
        each = [fp8_weight(N, K, is_block, device) for _ in range(E)]
        codes = torch.stack([weight.codes_NK.view(torch.uint8) for weight in each]).view(E4M3)
        found.append(Weight(codes, torch.stack([weight.scales for weight in each])))
    return tuple(found)


def hard_rows(K, device):
    """Rows of many sizes: with zeros, of both signs, a NaN, an infinity, and subnormal codes."""
    x = torch.randn(10, K, device=device)
    x[1] *= 1e-20
    x[2] *= 1e20
    x[3] = 0
    x[4, ::2] = -0.0
    x[4, 1::3] *= 1e-3
    x[5, 7] = float("nan")
    x[6, 9] = float("-inf")
    x[7] = x[7].exp() ** 3
    x[8, 0] = 448
    x[9] = float("nan")
    return x


def in_float64(x: Fp8Rows, weight: Fp8):
    """Multiply the same codes without rounding."""
    T, K = x.codes_TK.shape
    codes_TK, codes_NK = x.codes_TK.double(), weight.codes_NK.double()
    if x.is_block:
        of_x = x.scales.t()[:T].repeat_interleave(GROUP, 1)[:, :K]
        of_w = weight.scales.t().repeat_interleave(GROUP, 1)[:, :K]
    else:
        of_x, of_w = x.scales[:, None], weight.scales[:, None]
    return (codes_TK * of_x) @ (codes_NK * of_w).t()


def same(found, expected):
    """Compare bits: of codes, NaN included, and of scales up to the last row."""
    T = len(found.codes_TK)
    codes = (each.codes_TK.view(torch.uint8) for each in (found, expected))
    scales = (each.scales[..., :T] for each in (found, expected))
    return torch.equal(*codes) and torch.equal(*scales)
