"""Weights of FP8: codes of float8_e4m3fn, and scales for each row or for each block of 128 by 128.

A number is its code times its scale. Files have scales [N, 1] or [N] of a weight [N, K], or those
of blocks, [N / 128, K / 128] with counts rounded up. Kernels read them as float32: [N], or
[K / 128, N], where each row has its own, so that products whose rows are concatenated keep theirs
wherever they begin.
"""

from torch import Tensor

from weights.config import BLOCK, Form
from weights.errors import Problems
from weights.files.part import Part

Shape = tuple[int, ...]
SCALE = ".weight_scale"  # ends the name of a weight's scales


def is_scale(name: str) -> bool:
    """Say whether a tensor of this name is a weight's scales."""
    return name.endswith(SCALE)


def weight_of(scale: str) -> str:
    """Give the name of the weight that has these scales."""
    return scale.removesuffix("_scale")


def scale_of(weight: str) -> str:
    """Give the name of a weight's scales."""
    return f"{weight}_scale"


def stored_shape(form: Form, shape: Shape) -> Shape:
    """Give the shape of scales in files. shape: of the weight, [N, K]"""
    N, K = shape
    return (-(-N // BLOCK), -(-K // BLOCK)) if form == "fp8 block" else (N, 1)


def arranged_shape(stored: Shape, shape: Shape) -> Shape:
    """Give the shape of scales in memory. stored: in files; shape: of the weight, [N, K]"""
    N, K = shape
    are_of_rows = stored in ((N,), (N, 1))
    return (N,) if are_of_rows else (-(-K // BLOCK), N)


def fill(place: Tensor, stored: Tensor, part: Part | None) -> None:
    """Write a weight's scales as kernels read them: float32 [N], or of blocks [K / 128, N].

    place: for those of the part. stored: of the whole weight. part: None: all of it
    """
    rows, blocks = slice(0, place.shape[-1]), slice(None)
    if part is not None and part.axis == 0:
        rows = slice(part.start, part.stop)
    elif part is not None:
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    if place.ndim == 1:
        place.copy_(stored.flatten()[rows])
    else:
        place.copy_(stored[:, blocks].repeat_interleave(BLOCK, 0)[rows].t())


def check(stored: Tensor, where: str, problems: Problems) -> None:
    """Refuse scales that are no positive numbers: a line for the tensor. where: in files"""
    is_wrong = ~((stored > 0) & stored.isfinite())
    if bool(is_wrong.any()):
        wrong = stored[is_wrong]
        line = f"has {len(wrong)} scales that are no positive numbers, such as {float(wrong[0])}"
        problems.add(f"{where} {line}")
