"""Experts by torch's grouped products: the yardstick of the suites experts and exactness.

Nothing of specdec is imported here, so that the yardstick cannot be the shipped kernel. Rows are
sorted by expert, as grouped_mm takes them; what is between its products is compiled on a GPU. What
a device does not allow raises RuntimeError.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Layer(NamedTuple):
    """The weights of one layer, and how many experts a row takes."""

    router: Tensor  # [E, D]
    gate_up: Tensor  # [E, 2I, D]
    down: Tensor  # [E, D, I]
    norm: Tensor  # [D]
    eps: float
    num_chosen: int


def grouped_layer(x: Tensor, residual: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Go from the router's input [T, D] to the next norm; returns it and the stream."""
    compiled = _compiled if x.is_cuda else _as_it_is
    weights, order, ends = compiled(_choose)(_in_float32(x, layer.router), layer.num_chosen)
    y = _products(x[order // layer.num_chosen], ends, layer.gate_up, layer.down)
    return compiled(_combine)(y, weights, order, residual, layer.norm, layer.eps)


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Add up what the experts [T, k] make of rows [T, D]. Rows with an id E, padding, get any."""
    compiled = _compiled if x.is_cuda else _as_it_is
    order, ends = compiled(_sort)(ids, len(down))
    y = _products(x[order // ids.shape[1]], ends, gate_up, down)
    return compiled(_add_up)(y, weights, order).to(x.dtype)


def _products(rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Multiply pairs [P, D], sorted by expert, whose last ones may have none."""
    activate = (_compiled if rows.is_cuda else _as_it_is)(_activate)
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    h = activate(grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    return grouped_mm(h, down.transpose(1, 2), offs=ends)


def _as_it_is(piece: Callable[P, R]) -> Callable[P, R]:
    return piece


@cache
def _compiled(piece: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(piece, dynamic=True)


def _in_float32(x: Tensor, w: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return F.linear(x, w).float()


def _choose(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [T, k], pairs of row and slot by expert, and where each expert's end."""
    weights, ids = torch.softmax(logits, -1).topk(num_chosen)
    return weights / weights.sum(-1, keepdim=True), *_sort(ids, logits.shape[1])


def _sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return pairs of row and slot by expert, and where each expert's end."""
    ids_P = ids.flatten()
    experts = torch.arange(num_experts, device=ids.device)
    ends = (ids_P[None, :] == experts[:, None]).sum(1).cumsum(0).int()
    return ids_P.argsort(stable=True), ends


def _activate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _combine(
    y: Tensor, weights: Tensor, order: Tensor, residual: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    stream = residual + _add_up(y, weights, order).to(residual.dtype)
    return F.rms_norm(stream, norm.shape, norm, eps), stream


def _add_up(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    parts = y[place].view(*weights.shape, -1)
    return (parts * weights[..., None]).sum(1)
