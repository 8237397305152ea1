"""Which part of each tensor of a checkpoint a rank reads.

A row of CUTS says along which axis a tensor is cut; how much of it a rank has, its own config says.
Tensors that are whole there need no row: norms, routers, fc, and the biases of
o_proj and down_proj, which are added once, after the sum over ranks. Scales of FP8 weights are read
whole, and those of the weight's part are kept (fp8.py).
"""

import re
from typing import NamedTuple

from weights.files.part import Part
from weights.fp8 import is_scale
from weights.shapes import Shapes
from weights.shard import Shard


class Cut(NamedTuple):
    """A row says how one kind of tensor is cut. pattern: of its name before it is arranged"""

    pattern: str
    axis: int
    has_ids: bool = False  # along the axis, cut at the borders of blocks


CUTS = (
    Cut(r"(embed_tokens|lm_head)\.weight", 0, has_ids=True),
    Cut(r".*\.(q|k|v|gate|up)_proj\.(weight|bias)", 0),
    Cut(r".*\.(o|down)_proj\.weight", 1),
    Cut(r".*\.experts\.(gate_up|down)_proj(_turned|_bias|_blocks|_scales)?", 0),
    Cut(r".*\.sinks", 0),
)


def cut(wanted: Shapes, local: Shapes, shard: Shard) -> dict[str, Part]:
    """Find a rank's part of each tensor that it has only a part of.

    wanted: what the config of the whole model demands. local: what the rank's does
    """
    return {
        name: _part(name, wanted[name], shape, shard)
        for name, shape in local.items()
        if shape != wanted[name] and not is_scale(name)
    }


def _part(name: str, whole: tuple[int, ...], local: tuple[int, ...], shard: Shard) -> Part:
    row = next((row for row in CUTS if re.fullmatch(row.pattern, name)), None)
    assert row is not None, f"{name}: {local} of {whole}, and no row says which"
    axis = row.axis
    if row.has_ids:
        found = shard.ids_of(whole[axis])
    else:  # parts are equal, and some ranks may share one
        first = shard.range_of(whole[axis] // local[axis]).start * local[axis]
        found = range(first, first + local[axis])
    part = Part(axis, found.start, found.stop)
    assert part.shape_in(whole) == local, f"{name}: {part} of {whole} for {local}"
    return part
