"""Weights and choices of experts for tests, and what the products of linear.py make of them."""

import itertools

import torch

from specdec.kernels.experts.tiles import ExpertTiles, persistent_candidates
from specdec.kernels.gate_up import launch_gate_up
from specdec.kernels.linear import launch_linear


def experts(E, D, I, device, dtype=torch.float32):
    """Weights of E experts: gate_up [E, 2I, D] and down [E, D, I]."""
    gate_up = torch.empty(E, 2 * I, D, device=device, dtype=dtype).normal_(std=D**-0.5)
    return gate_up, torch.empty(E, D, I, device=device, dtype=dtype).normal_(std=I**-0.5)


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


def persistent(block_m):
    """All tiles of persistent/ that are so high."""
    of_both = (persistent_candidates(part, block_m) for part in ("gate_up", "down"))
    return [ExpertTiles(*each, True, True, True) for each in itertools.product(*of_both)]


def by_products(x, ids, gate_up, down):
    """One expert after another by the kernels of dense layers; NaN for no expert."""
    parts = torch.full((ids.shape[1], *x.shape), float("nan"), device=x.device, dtype=x.dtype)
    for e in ids.unique().tolist():
        if e < len(gate_up):
            rows, slots = (ids == e).nonzero(as_tuple=True)
            h = launch_gate_up(x[rows], gate_up[e], None)
            parts[slots, rows] = launch_linear(h, down[e], None, x.dtype)
    return parts
