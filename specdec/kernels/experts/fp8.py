"""The sums of an expert's product of 8 bits, in the order of kernels/fp8/sums.py."""

from specdec.kernels import jit, tl
from specdec.kernels.experts.pairs import columns_of
from specdec.kernels.fp8.sums import promoted, times
from specdec.kernels.sum_order import add_now


@jit
def fp8_sums(
    w_desc,
    row,
    x_at,
    pair,
    x_row,
    scales,
    n0,
    N,
    K,
    num_n,
    stride_scales,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum W x^T and, if gated, the up rows' as float32 tiles [BLOCK_N, pairs].

    row: of W, the tile's first. x_at: where pairs' codes begin. x_row: the row of each one's scale.
    scales: where those of x and of the expert are. num_n: scales of W from a group to the next
    """
    n = n0 + tl.arange(0, BLOCK_N)
    x_scale_at = scales[0] + x_row
    w_scale_at = scales[1] + n
    has_row = pair >= 0
    total = tl.zeros((BLOCK_N, pair.shape[0]), tl.float32)
    up = total
    blocks = tl.cdiv(K, BLOCK_K)
    # scales are loaded before the product that they multiply: W's, from memory, a block ahead
    if IS_BLOCK:
        w_next = tl.load(w_scale_at, mask=n < N, other=0.0)
        if IS_GATED:
            up_next = tl.load(w_scale_at + N, mask=n < N, other=0.0)
    for i in range(blocks):
        if IS_BLOCK:
            x_scale = tl.load(x_scale_at + i * stride_scales, mask=has_row, other=0.0)[None, :]
            w_scale = w_next[:, None]
            w_scale_at += num_n
            has_next = i + 1 < blocks
            w_next = tl.load(w_scale_at, mask=(n < N) & has_next, other=0.0)
            if IS_GATED:
                up_scale = up_next[:, None]
                up_next = tl.load(w_scale_at + N, mask=(n < N) & has_next, other=0.0)
        x = columns_of(x_at, pair, i * BLOCK_K + tl.arange(0, BLOCK_K), K, IS_WHOLE)
        part = tl.dot(w_desc.load([row, i * BLOCK_K]), x)
        total = promoted(total, part, w_scale, x_scale) if IS_BLOCK else add_now(total, part)
        if IS_GATED:
            part = tl.dot(w_desc.load([row + N, i * BLOCK_K]), x)
            up = promoted(up, part, up_scale, x_scale) if IS_BLOCK else add_now(up, part)
    if not IS_BLOCK:
        x_scale = tl.load(x_scale_at, mask=has_row, other=0.0)[None, :]
        total = times(times(total, x_scale), tl.load(w_scale_at, mask=n < N, other=0.0)[:, None])
        if IS_GATED:
            up_scale = tl.load(w_scale_at + N, mask=n < N, other=0.0)[:, None]
            up = times(times(up, x_scale), up_scale)
    return total, up
