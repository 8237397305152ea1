"""Arithmetic of the torch twins whose result for a row depends on nothing but the row.

Element-wise +, -, *, / and sqrt are exact everywhere. Three things are not: exp (vector body and
scalar tail differ), sums and matrix products (their order follows the shape). Here each runs in
blocks of one fixed shape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8  # rows of one product block
LANES = 64  # exp runs over a multiple of these elements: whole vectors, whatever their width
BLOCK = 16384  # elements of one exp block: fewer than torch splits among threads
# product widths are padded to whole vectors: at odd widths a row's result depends on its place
ALIGN = 16


def blocked_exp(x: Tensor) -> Tensor:
    """Compute exp of a float32 tensor, in contiguous blocks of whole vectors."""
    flat = x.reshape(-1)
    if x.numel() % LANES:
        flat = F.pad(flat, (0, -x.numel() % LANES))
    blocks = [block.exp() for block in torch.split(flat, BLOCK)]
    powers = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return powers[: x.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """Compute the logistic function in float32."""
    x = x.float()
    return torch.sigmoid(x) if x.is_cuda else 1 / (1 + blocked_exp(-x))


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension pairwise, over a power of two; keeps the dimension."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    if width > x.shape[-1]:
        x = F.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x


def blocked_product(x_TK: Tensor, weight_NK: Tensor, splits: int = 1) -> Tensor:
    """Multiply x by weight transposed in float32, in blocks of 8 rows. Returns [T, N] float32.

    splits: of K, which divide it, each multiplied apart; neighbours are added first
    """
    T, K = x_TK.shape
    N = weight_NK.shape[0]
    x = x_TK.float()
    if K % ALIGN or T % ROWS or not x.is_contiguous():
        x = F.pad(x, (0, -K % ALIGN, 0, -T % ROWS)).contiguous()
    weight = weight_NK.float()
    if K % ALIGN or N % ALIGN:
        weight = F.pad(weight, (0, -K % ALIGN, 0, -N % ALIGN))
    out = _sum_of_splits(x.view(-1, ROWS, x.shape[1]), weight.t(), splits)
    return out.view(-1, weight.shape[0])[:T, :N]


def _sum_of_splits(blocks_BRK: Tensor, weight_KN: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return torch.bmm(blocks_BRK, weight_KN.expand(len(blocks_BRK), -1, -1))
    half = blocks_BRK.shape[2] // 2
    low = _sum_of_splits(blocks_BRK[..., :half], weight_KN[:half], splits // 2)
    return low.add_(_sum_of_splits(blocks_BRK[..., half:], weight_KN[half:], splits // 2))
