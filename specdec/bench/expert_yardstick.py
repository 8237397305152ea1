"""A layer of experts by torch's grouped products: the yardstick of the suite experts.

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
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    weights, order, ends = compiled(_choose)(_in_float32(x, layer.router), layer.num_chosen)
    rows = x[order // layer.num_chosen]
    h = compiled(_activate)(grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends))
    y = grouped_mm(h, layer.down.transpose(1, 2), offs=ends)
    return compiled(_combine)(y, weights, order, residual, layer.norm, layer.eps)


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
    ids_P = ids.flatten()
    experts = torch.arange(logits.shape[1], device=logits.device)
    ends = (ids_P[None, :] == experts[:, None]).sum(1).cumsum(0).int()
    return weights / weights.sum(-1, keepdim=True), ids_P.argsort(stable=True), ends


def _activate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _combine(
    y: Tensor, weights: Tensor, order: Tensor, residual: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    parts = y[place].view(*weights.shape, -1)
    stream = residual + (parts * weights[..., None]).sum(1).to(residual.dtype)
    return F.rms_norm(stream, norm.shape, norm, eps), stream
