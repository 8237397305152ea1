"""Weights and choices of experts for tests, and what the products of linear.py make of them."""

import torch

from specdec.kernels.experts.weight import Weight
from specdec.kernels.gate_up import launch_gate_up
from specdec.kernels.linear import launch_linear
from tests.weights.mxfp4 import drawn, numbers_of
from weights.turned import move_of


def experts(E, D, I, device, dtype=torch.float32):
    """Weights of E experts: gate_up [E, 2I, D] and down [E, D, I]."""
    gate_up = torch.empty(E, 2 * I, D, device=device, dtype=dtype).normal_(std=D**-0.5)
    down = torch.empty(E, D, I, device=device, dtype=dtype).normal_(std=I**-0.5)
    return Weight(gate_up), Weight(down)


def packed_experts(E, D, I, device, dtype=torch.float32, has_bias=True):
    """Weights of E experts in MXFP4, and the same ones a number each."""
    packed, plain = [], []
    for name, N, K in (("gate_up_proj", 2 * I, D), ("down_proj", D, I)):
        blocks, scales = drawn(E, N, K, device=device)
        words = move_of(f"experts.{name}_blocks").run(blocks).contiguous()
        scale_words = move_of(f"experts.{name}_scales").run(scales).contiguous()
        bias = torch.randn(E, N, device=device).to(dtype) if has_bias else None
        packed.append(Weight(words, scale_words, bias))
        numbers = numbers_of(blocks, scales).to(dtype)
        if name == "gate_up_proj":  # rows alternate in blocks
            numbers = torch.cat([numbers[:, ::2], numbers[:, 1::2]], dim=1)
        plain.append(Weight(numbers, None, bias))
    return tuple(packed), tuple(plain)


def choices(T, E, k, device, how="drawn"):
    """Choices of T rows: drawn, all the same, or with rows of padding among them."""
    ids = torch.rand(T, E, device=device).topk(k).indices.int()
    if how == "one":
        ids = ids[:1].repeat(T, 1)
    elif how == "padded":
        ids[::3] = E
    elif how == "nobody":
        ids[:] = E
    return ids


def by_products(x, ids, gate_up, down):
    """One expert after another by the kernels of dense layers; NaN for no expert."""
    parts = torch.full((ids.shape[1], *x.shape), float("nan"), device=x.device, dtype=x.dtype)
    for e in ids.unique().tolist():
        if e < gate_up.num_experts:
            rows, slots = (ids == e).nonzero(as_tuple=True)
            h = launch_gate_up(x[rows], gate_up.data[e], None)
            parts[slots, rows] = launch_linear(h, down.data[e], None, x.dtype)
    return parts
