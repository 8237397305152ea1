"""Stacks of experts as gpt-oss has them in files, and the moves from there.

Rows of gate and up alternate there: 2i is gate i and 2i + 1 is up i, in weights and biases. In
plain weights they are columns. MXFP4 (OCP Microscaling Formats, version 1.0) has two numbers in a
byte, the even column in its low half, and a scale for each 32 columns. What kernels read of it:

- words [E, G, R, 128, 4] int32: columns 64 g to 64 g + 63 of a block of 64 rows; blocks of gate and
  of up take turns. Word 2 a + c of place 32 w + 4 i + q has 8 codes of row 16 w + 8 a + i: those of
  columns 32 c + 16 j + 8 h + 2 q + l for j, h and l of 0 and 1. So a place has what one thread of
  the tensor cores' operand takes. Bit b of the code of j, h and l = 0 is bit BITS[2 j + h][b] of
  the word, and for l = 1 the bit 16 places on or back: most codes are then one shift and one mask
  away from their places in a bfloat16
- scales [E, H, N] int32: byte b of a word is that of columns 128 h + 32 b to 128 h + 32 b + 31

What is missing at the end of a row or of a block are zeros, and scales of 1. A move is done for all
experts or for some at a time, and moves each element to one place.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]
ROWS = 64  # of a block of words
BITS = (0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15)
MAGNITUDES = 0x5DF75DF7  # all bits of a word but the codes' signs
NO_SCALE = 127  # of a block of zeros: 2^0


class Move(NamedTuple):
    """How one kind of tensor is moved, which ends in `of` and afterwards in `to`."""

    of: str
    to: str
    shape: Callable[[Shape], Shape]  # of the arranged tensor, from that of the file's
    run: Callable[[Tensor], Tensor]  # from the file's tensor, all of it or of some experts
    dtype: torch.dtype | None = None  # None: the model's


def move_of(name: str) -> Move | None:
    """Find the move of a tensor by its name before it is arranged; None: it stays as it is."""
    return next((move for move in MOVES if name.endswith(move.of)), None)


def _halves(x_EX: Tensor) -> Tensor:
    """Put even rows before odd ones: [E, 2I, ...]."""
    return torch.cat([x_EX[:, ::2], x_EX[:, 1::2]], dim=1)


def _as_scales(scales_ENB: Tensor) -> Tensor:
    """Make [E, H, N] int32 of [E, N, B] bytes."""
    padded = F.pad(scales_ENB, (0, -scales_ENB.shape[2] % 4), value=NO_SCALE).contiguous()
    return padded.view(torch.int32).transpose(1, 2)


def _as_words(blocks_ENBX: Tensor, parts: int) -> Tensor:
    """Make [E, G, R, 128, 4] int32 of [E, N, B, 16] bytes.

    parts: of the rows, which have blocks of their own
    """
    E, N, B, _ = blocks_ENBX.shape
    G = -(-B // 2)
    blocks = blocks_ENBX.reshape(E, parts, N // parts, B, 16)
    padded = F.pad(blocks, (0, 0, 0, B % 2, 0, -(N // parts) % ROWS))
    bytes_ = padded.view(E, parts, -1, 4, 2, 8, G, 2, 2, 2, 4)  # block, w, a, i, G, c, j, h, q
    ordered = bytes_.permute(0, 6, 2, 1, 3, 5, 10, 4, 7, 8, 9).reshape(E, G, -1, 128, 16)
    words = ordered.view(torch.int32)
    return _at_their_bits(_even_digits(words) | _even_digits(words >> 4) << 16)


def _at_their_bits(words: Tensor) -> Tensor:
    """Move the bits of codes that lie one after another, those of each l in a half, to BITS."""
    stay = words & (0x80778077 - (1 << 32))
    moved = (words & 0x00880088) << 6 | (words & 0x17001700) << 2 | words >> 6 & 0x01800180
    to_the_other_half = words >> 8 & 0x00080008
    return stay | moved | to_the_other_half << 16 | to_the_other_half >> 16


def _even_digits(words: Tensor) -> Tensor:
    """Leave the even ones of eight hexadecimal digits, in the low half."""
    words = words & 0x0F0F0F0F
    words = (words | words >> 4) & 0x00FF00FF
    return (words | words >> 8) & 0x0000FFFF


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _packed(name: str, order: Callable[[Tensor], Tensor], parts: int) -> tuple[Move, Move]:
    """Move the blocks and scales of a product. order: of its rows, which have so many parts"""

    def words_of(blocks: Tensor) -> Tensor:
        return _as_words(order(blocks), parts)

    def scales_of(scales: Tensor) -> Tensor:
        return _as_scales(order(scales))

    def shape_of_words(stored: Shape) -> Shape:
        E, N, B, _ = stored
        return E, -(-B // 2), parts * -(-N // parts // ROWS), 128, 4

    return (
        Move(f"{name}_blocks", name, shape_of_words, words_of, torch.int32),
        Move(f"{name}_scales", f"{name}_scales", _shape_of_scales, scales_of, torch.int32),
    )


def _shape_of_scales(stored: Shape) -> Shape:
    E, N, B = stored
    return E, -(-B // 4), N


def _transposed(stored: Shape) -> Shape:
    E, K, N = stored
    return E, N, K


MOVES = (
    Move("gate_up_proj_turned", "gate_up_proj", _transposed, lambda x: _halves(x.transpose(1, 2))),
    Move("down_proj_turned", "down_proj", _transposed, lambda x: x.transpose(1, 2)),
    Move("gate_up_proj_bias", "gate_up_proj_bias", lambda shape: shape, _halves),
    *_packed("gate_up_proj", _halves, 2),
    *_packed("down_proj", _as_it_is, 1),
)
