"""Codes with their scales: of a dense product's weight, from the reader to the kernel, and of x."""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
GROUP = 128  # of K: what a scale of the block form is for, and what one accumulator sums
LARGEST = 448.0  # of e4m3
# rows of scales of the block form: a tile of any height lies inside, or the copy engine takes
# longer for the scales of one row than for its weights
ALIGNED = 256
LEAST_PEAK = 1e-10  # of a row or group: one of smaller numbers is scaled as if it had this


class Fp8(NamedTuple):
    """A product's W: the number at n, k is its code times the scale of its row, or group of one.

    Scales are float32 [N] (channel) or [K / 128, N], rounded up (block), contiguous.
    is_shared: each 64 rows, the first a multiple of 64, have the same scales, in the block form:
        where all parts have multiples of 64 rows. Products are the same, and faster.
    """

    codes_NK: Tensor  # float8_e4m3fn
    scales: Tensor
    is_shared: bool = False

    @property
    def is_block(self) -> bool:
        return self.scales.dim() == 2


class Fp8Rows(NamedTuple):
    """Rows of x, as `quantise` leaves them: the number at t, k is its code times a scale.

    Scales are float32 [T] (channel), or [K / 128, T] with both rounded up, T to a multiple of 256
    (block): what is after the last row may be anything.
    """

    codes_TK: Tensor  # float8_e4m3fn
    scales: Tensor

    @property
    def is_block(self) -> bool:
        return self.scales.dim() == 2


class Scales(NamedTuple):
    """The scales of both sides of a product, of one form."""

    x: Tensor
    w: Tensor
    is_shared: bool = False  # as in Fp8


def form_of(scales: Scales | None) -> str:
    """Name a product's form: "channel", "block", or "plain" without scales."""
    if scales is None:
        return "plain"
    return "block" if scales.w.dim() == 2 else "channel"


def num_groups(K: int) -> int:
    """Count the groups of 128 along K, the last of which may be shorter."""
    return -(-K // GROUP)


def scales_shape(T: int, K: int, is_block: bool) -> tuple[int, ...]:
    """Give the shape of the scales of T rows."""
    return (num_groups(K), (T + ALIGNED - 1) // ALIGNED * ALIGNED) if is_block else (T,)
