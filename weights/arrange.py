"""How tensors of files lie in those that kernels read: the only place that moves elements.

An arrangement is a map from names of the checkpoint to parts of larger tensors, so each element has
one place, and `pieces` is both how a load fills them and the way back. Two steps lead there:

- over rows: q, k and v make one product and gate and up another; fewer, larger matrices
- stacked: a product of all experts of a layer is one tensor [E, N, K]

Files of gpt-oss have stacks of their own, whose elements change places (turned.py). Scales of FP8
weights go with the weights' rows, however files have them (fp8.py).
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weights.fp8 import arranged_shape, is_scale, weight_of
from weights.shapes import Shapes
from weights.turned import Move, move_of

# which names make up one: their weights and biases are concatenated over rows
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
STACKED = re.compile(r"(.*\.experts)\.([0-9]+)\.(\w+)\.weight(_scale)?")


class Place(NamedTuple):
    """Where a tensor of the checkpoint lies: a part of a larger one, by its first dimensions."""

    whole: str
    part: tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """shapes: of the arranged tensors. places: by names of the checkpoint.

    moves:  how elements of a checkpoint's tensor change places, where they do, by its name
    dtypes: of arranged tensors that have one of their own
    """

    shapes: Shapes
    places: dict[str, Place]
    moves: dict[str, Move] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Allocate the arranged tensors. dtype: of those that have none of their own"""
        return {
            name: torch.empty(shape, dtype=self.dtypes.get(name, dtype), device=device)
            for name, shape in self.shapes.items()
        }

    def pieces(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Find the checkpoint's tensors in the arranged ones: contiguous views.

        Those with a move have the arranged shape, and scales of blocks that of fp8.arranged_shape.
        """
        return {name: tensors[place.whole][place.part] for name, place in self.places.items()}


def arrange(wanted: Shapes) -> Arrangement:
    """Arrange what a config demands, whole or a rank's, by the names of the checkpoint."""
    moved = {name: move for name in wanted if (move := move_of(name)) is not None}
    scales = [name for name in wanted if is_scale(name)]
    shapes = wanted | {name: move.shape(wanted[name]) for name, move in moved.items()}
    shapes |= {name: arranged_shape(wanted[name], wanted[weight_of(name)]) for name in scales}
    fused = _fuse(shapes)
    stacked = _stack(fused.shapes)
    places: dict[str, Place] = {}
    for name, inner in fused.places.items():
        outer = stacked.places[inner.whole]
        places[name] = Place(outer.whole, (*outer.part, *inner.part))
    dtypes = {name: torch.float32 for name in wanted if name.endswith(".sinks")}
    for name in scales:
        dtypes[places[name].whole] = torch.float32
        dtypes[places[weight_of(name)].whole] = torch.float8_e4m3fn
    for name, move in moved.items():
        whole = name.removesuffix(move.of) + move.to
        stacked.shapes[whole] = stacked.shapes.pop(name)
        places[name] = Place(whole, ())
        if move.dtype is not None:
            dtypes[whole] = move.dtype
    return Arrangement(stacked.shapes, places, moved, dtypes)


def _fuse(wanted: Shapes) -> Arrangement:
    """Concatenate over rows, which of scales are the last dimension."""
    shapes: Shapes = {}
    places: dict[str, Place] = {}
    for name, shape in wanted.items():
        whole, pieces = _fused(name)
        axis = len(shape) - 1 if is_scale(name) else 0
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + wanted[piece][axis])
        at = pieces.index(name)
        shapes[whole] = (*shape[:axis], ends[-1], *shape[axis + 1 :])
        rows = slice(ends[at], ends[at + 1])
        places[name] = Place(whole, (*[slice(None)] * axis, rows))
    return Arrangement(shapes, places)


def _fused(name: str) -> tuple[str, tuple[str, ...]]:
    """The tensor that this one is part of, and the names of all its parts in order."""
    for whole, pieces in FUSED.items():
        for piece in pieces:
            if f".{piece}." in name:
                return name.replace(piece, whole), tuple(name.replace(piece, p) for p in pieces)
    return name, (name,)


def _stack(wanted: Shapes) -> Arrangement:
    """Stack the experts of a layer by number, whatever the order of their names."""
    found = {name: match for name in wanted if (match := STACKED.fullmatch(name))}
    numbers: dict[str, list[int]] = {}  # of the experts in a stack: neighbours
    for match in found.values():
        numbers.setdefault(_stack_of(match), []).append(int(match[2]))
    shapes: Shapes = {}
    places: dict[str, Place] = {}
    for name, shape in wanted.items():
        if name not in found:
            shapes[name] = shape
            places[name] = Place(name, ())
            continue
        whole = _stack_of(found[name])
        shapes[whole] = (len(numbers[whole]), *shape)
        places[name] = Place(whole, (int(found[name][2]) - min(numbers[whole]),))
    return Arrangement(shapes, places)


def _stack_of(expert: re.Match[str]) -> str:
    return f"{expert[1]}.{expert[3]}{'_scales' if expert[4] else ''}"
