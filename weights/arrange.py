"""How tensors of files lie in those that kernels read: the only place that moves elements.

An arrangement is a map from names of the checkpoint to parts of larger tensors, so each element has
one place, and `pieces` is both how a load fills them and the way back. q, k and v make one product
and gate and up another, over rows: fewer, larger matrices.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weights.shapes import Shapes

# which names make up one: their weights and biases are concatenated over rows
FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Place(NamedTuple):
    """Where a tensor of the checkpoint lies: the rows of a larger one."""

    whole: str
    rows: slice


@dataclass(frozen=True, slots=True)
class Arrangement:
    """shapes: of the arranged tensors. places: by names of the checkpoint."""

    shapes: Shapes
    places: dict[str, Place]

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Allocate the arranged tensors."""
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, shape in self.shapes.items()
        }

    def pieces(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Find the checkpoint's tensors in the arranged ones: contiguous views."""
        return {name: tensors[whole][rows] for name, (whole, rows) in self.places.items()}


def arrange(wanted: Shapes) -> Arrangement:
    """Arrange all tensors that a config demands, by the names and shapes of the checkpoint."""
    shapes: Shapes = {}
    places: dict[str, Place] = {}
    for name, shape in wanted.items():
        whole, pieces = _fused(name)
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + wanted[piece][0])
        at = pieces.index(name)
        shapes[whole] = (ends[-1], *shape[1:])
        places[name] = Place(whole, slice(ends[at], ends[at + 1]))
    return Arrangement(shapes, places)


def _fused(name: str) -> tuple[str, tuple[str, ...]]:
    """The tensor that this one is part of, and the names of all its parts in order."""
    for whole, pieces in FUSED.items():
        for piece in pieces:
            if f".{piece}." in name:
                return name.replace(piece, whole), tuple(name.replace(piece, p) for p in pieces)
    return name, (name,)
