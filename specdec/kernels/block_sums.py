"""Sums over the ids of a vocabulary in one order, on however many GPUs the ids are.

Each block of ids is summed alone, then the sums of blocks. Ids are cut at the borders of blocks
(weights/shard.py), so ranks exchange the sums of their blocks, and add them as one GPU does.
"""

import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.cut_ids import CutIds, num_ids
from specdec.kernels.invariant import blocked_exp, tree_sum
from specdec.kernels.overlap import begin
from weights.shard import vocabulary_block

NUM_WARPS = 8  # of a block; with the block it decides the order


def sum_over_ids(x: Tensor, cut: CutIds | None = None) -> Tensor:
    """Sum [..., V] over its last dimension, which is kept. x: float32, contiguous."""
    block = vocabulary_block(num_ids(x, cut))
    sums = block_sums(x, block)
    return add_blocks(sums if cut is None else cut.joined(sums, -1, block))


def powers_of(x: Tensor) -> Tensor:
    """Compute exp(x) so that an element's result does not depend on its place."""
    return x.exp() if use_triton(x) else blocked_exp(x)


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sum the blocks of [..., V]: [..., blocks]."""
    if not use_triton(x):
        return block_sums_ref(x, block)
    *shape, V = x.shape
    out = x.new_empty(*shape, -(-V // block))
    grid = (out.shape[-1], out.numel() // out.shape[-1])
    options = {"BLOCK": block, "num_warps": NUM_WARPS} | launch_options(x)
    _block_sums_kernel[grid](out, x.contiguous(), V, **options)
    return out


def add_blocks(sums: Tensor) -> Tensor:
    """Add the sums of all blocks, [..., blocks] to [..., 1]."""
    if not use_triton(sums):
        return tree_sum(sums)
    *shape, blocks = sums.shape
    out = sums.new_empty(*shape, 1)
    options = {"BLOCK": next_power_of_2(blocks), "num_warps": 1} | launch_options(sums)
    _block_sums_kernel[(1, out.numel())](out, sums.contiguous(), blocks, **options)
    return out


@jit(varying=("out_ptr", "x_ptr", "V"))
def _block_sums_kernel(
    out_ptr,  # [X, blocks]
    x_ptr,  # [X, V]
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    block = tl.program_id(0)
    x = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + x.to(tl.int64) * V + column, mask=column < V, other=0.0)
    tl.store(out_ptr + x * tl.num_programs(0) + block, tl.sum(values, axis=0))


def block_sums_ref(x: Tensor, block: int) -> Tensor:
    padded = F.pad(x, (0, -x.shape[-1] % block))
    return tree_sum(padded.unflatten(-1, (-1, block)))[..., 0]
