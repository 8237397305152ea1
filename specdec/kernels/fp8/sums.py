"""The order of a row's sum over K, for every kernel of 8-bit products.

Each 128 of K begins a fresh accumulator. Its sum is added to that of the split, in the block form
multiplied by both scales: total = fma(sum, w * x, total). In the channel form a split's sum is
multiplied at its end, first by the scale of x. Neighbouring splits are added then (sum_order.py).

Additions are where they are written: a compiler that finds total + a b folds all of K into one
accumulator of the tensor cores, whose 14 bits are too few, and a product and a sum into one
rounding in some kernels, in others not.
"""

from specdec.kernels import HAS_TRITON, jit, tl
from specdec.kernels.sum_order import IS_COMPILED, add_now

MULTIPLY = tl.constexpr("mul.rn.f32 $0, $1, $2;") if HAS_TRITON else None


@jit
def split_sums(
    descs, scales, n0, m0, first, blocks, sizes, IS_GATED: tl.constexpr, IS_BLOCK: tl.constexpr
):
    """Sum some blocks of 128 of K of W x^T as float32 tiles [BLOCK_N, BLOCK_M], of up rows too.

    descs: of x, of W and of its up rows. scales: where those of x, W and up rows are. sizes: T, N,
    and the numbers of scales of x and of W from a group to the next
    """
    x_desc, w_desc, up_desc = descs
    BLOCK_N: tl.constexpr = w_desc.block_shape[0]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    T, N, x_width, w_width = sizes
    n = n0 + tl.arange(0, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    x_at, w_at, up_at = scales[0] + m, scales[1] + n, scales[2] + n
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = total
    if IS_BLOCK:
        x_at += first * x_width
        w_at += first * w_width
        up_at += first * w_width
        x_next = tl.load(x_at, mask=m < T, other=0.0)
        w_next = tl.load(w_at, mask=n < N, other=0.0)
        if IS_GATED:
            up_next = tl.load(up_at, mask=n < N, other=0.0)
    for i in range(blocks):
        k = (first + i) * w_desc.block_shape[1]
        x = tl.trans(x_desc.load([m0, k]))
        w = w_desc.load([n0, k])
        if IS_BLOCK:
            x_scale, w_scale = x_next, w_next
            x_at += x_width
            w_at += w_width
            x_next = tl.load(x_at, mask=(m < T) & (i + 1 < blocks), other=0.0)
            w_next = tl.load(w_at, mask=(n < N) & (i + 1 < blocks), other=0.0)
            if IS_GATED:
                up_scale = up_next
                up_at += w_width
                up_next = tl.load(up_at, mask=(n < N) & (i + 1 < blocks), other=0.0)
                part = tl.dot(up_desc.load([n0, k]), x)
                up = promoted(up, part, up_scale[:, None], x_scale[None, :])
            total = promoted(total, tl.dot(w, x), w_scale[:, None], x_scale[None, :])
        else:
            if IS_GATED:
                up = add_now(up, tl.dot(up_desc.load([n0, k]), x))
            total = add_now(total, tl.dot(w, x))
    if not IS_BLOCK:
        x_scale = tl.load(x_at, mask=m < T, other=0.0)[None, :]
        total = times(times(total, x_scale), tl.load(w_at, mask=n < N, other=0.0)[:, None])
        if IS_GATED:
            up = times(times(up, x_scale), tl.load(up_at, mask=n < N, other=0.0)[:, None])
    return total, up


@jit
def promoted(total, part, w_scale, x_scale):
    """Add a block's sum to the total, times both scales."""
    return tl.fma(part, w_scale * x_scale, total)


@jit
def times(total, scale):
    """Multiply a tile here, with a rounding of its own."""
    if IS_COMPILED:
        scale = tl.broadcast_to(scale, total.shape)
        return tl.inline_asm_elementwise(
            MULTIPLY, "=f,f,f", [total, scale], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return total * scale


@jit
def sums_of(
    descs,
    scales,
    n0,
    m0,
    split,
    blocks,
    sizes,
    IS_GATED: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Sum COUNT splits of a tile, from `split` on, as sum_order.py does. blocks: in each.

    Gated products have one split.
    """
    if COUNT == 1:
        first = split * blocks
        return split_sums(descs, scales, n0, m0, first, blocks, sizes, IS_GATED, IS_BLOCK)
    else:
        HALF: tl.constexpr = (COUNT + 1) // 2
        low, _ = sums_of(descs, scales, n0, m0, split, blocks, sizes, False, IS_BLOCK, HALF)
        after = split + HALF
        rest: tl.constexpr = COUNT - HALF
        high, _ = sums_of(descs, scales, n0, m0, after, blocks, sizes, False, IS_BLOCK, rest)
        total = add_now(low, high)
        return total, total
