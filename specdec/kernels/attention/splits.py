"""The borders of attention's splits and tiles, and how a row's partial results grow and add up.

A partial result of a query row is a peak (of its scores), a total (of 2 to the power of score -
peak) and the values weighted by these powers; it starts as -inf, 0 and 0. `attend_tile` takes 64
more keys into it, `add_part` adds one of later keys. Every kernel of attention is made of these
two, on the same tiles in the same order, which is why all of them give a row the same bits.

Tried: keys and values on the wide side of the product, as exact, but slower from 64 requests on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.kernels.head_columns import block_of, columns, inside_columns
from specdec.kernels.invariant import ROWS, blocked_exp, tree_sum


def num_splits(num_keys: int) -> int:
    """Count the splits that cover this many keys; the inverse of `split_start`."""
    sizes = (64, min(num_keys, 1024)), (128, 3072), (256, 4096), (512, num_keys)
    count = 0
    for size, keys in sizes:
        count += -(-min(num_keys, keys) // size)
        num_keys = max(num_keys - keys, 0)
    return count


def tiles_of_split(split: int) -> int:
    """Count the tiles of 64 keys in a split, by the borders of `split_start`."""
    return 1 if split < 16 else 2 if split < 40 else 4 if split < 56 else 8


@jit
def split_start(split):
    """Find the first key of a split; any number of splits."""
    start = tl.where(split < 16, split * 64, 1024 + (split - 16) * 128)
    start = tl.where(split < 40, start, 4096 + (split - 40) * 256)
    return tl.where(split < 56, start, 8192 + (split - 56) * 512)


@jit
def split_of(key):
    split = tl.where(key < 1024, key // 64, 16 + (key - 1024) // 128)
    split = tl.where(key < 4096, split, 40 + (key - 4096) // 256)
    return tl.where(key < 8192, split, 56 + (key - 8192) // 512)


@jit
def first_seen(position, window):
    """Find the first key in the window of a row at this position."""
    return tl.maximum(position - window + 1, 0)


@jit
def start_of(split, first, window, S: tl.constexpr):
    """Find the first key of a split, or of the tile where the window of row `first` begins."""
    start = split_start(split)
    if window is not None:
        start = tl.maximum(start, first_seen(first, window) // S * S)
    return start


@jit
def count_splits(first, last, window):
    """Count the splits from the window of row `first` on, up to key `last` (-1: no key)."""
    count = split_of(tl.maximum(last, 0)) + 1 - split_of(first_seen(first, window))
    return tl.where(last < 0, 0, count)


@jit
def is_seen_by(position, key, window):
    """Say which keys each row sees. [rows, keys]"""
    is_seen = key[None, :] <= position[:, None]
    if window is not None:
        is_seen = is_seen & (key[None, :] > position[:, None] - window)
    return is_seen


@jit
def attend_split(
    q,
    keys,
    block,
    position,
    first,
    last,
    split,
    scale,
    g,
    window,
    SIZES: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Attend to one split: peak and total [rows] of the powers of 2, weighted values.

    q, weighted values: [rows, block of C]; see head_columns.py. keys: the caches of keys and
    values, and the request's blocks [M]. block: of the first key by `start_of`; the next one is
    looked up a tile ahead. position: [rows], -1 = no row; between first and last; None: all rows
    see all keys up to last, which ends a tile. window: of each row's last keys; None: all. SIZES:
    H, G, S, C. SKIP: no masks where first sees a whole tile, without a window.
    """
    S: tl.constexpr = SIZES[2]
    peak, total, acc = no_keys(q.shape[0], SIZES[3])
    s = tl.arange(0, S)
    start = start_of(split, first, window, S)
    end = tl.minimum(split_start(split + 1), last + 1)
    if window is None and (SKIP or position is None):
        edge = end
        if position is not None:
            edge = tl.maximum(start, tl.minimum(end, (first + 1) // S * S))
        for at in range(start, edge, S):
            k, v = load_keys(keys, block, at, last, g, SIZES, False)
            block = block_at(keys, at + S, last, S)
            peak, total, acc = attend_tile(q, k, v, None, scale, peak, total, acc)
        start = edge
    if position is not None:
        for at in range(start, end, S):
            k, v = load_keys(keys, block, at, last, g, SIZES, True)
            block = block_at(keys, at + S, last, S)
            is_seen = is_seen_by(position, at + s, window)
            peak, total, acc = attend_tile(q, k, v, is_seen, scale, peak, total, acc)
    return peak, total, acc


@jit
def attend_all(q, keys, position, first, last, whole, scale, g, window, SIZES: tl.constexpr):
    """Attend to all keys, split by split: peak, total and weighted values, as in `attend_split`.

    One loop serves all splits, so that the next tiles are on their way across their borders, too.
    whole: what these begin as.
    """
    S: tl.constexpr = SIZES[2]
    C: tl.constexpr = SIZES[3]
    peak, total, acc = whole
    none, nothing, zeros = no_keys(q.shape[0], C)
    part_peak, part_total, part_acc = none, nothing, zeros
    s = tl.arange(0, S)
    begin = start_of(0, first, window, S) if window is not None else 0
    block = block_at(keys, begin, last, S)
    for at in range(begin, last + 1, S):
        k, v = load_keys(keys, block, at, last, g, SIZES, True)
        block = block_at(keys, at + S, last, S)
        is_border = split_start(split_of(at)) == at
        with_part = add_part(peak, total, acc, part_peak, part_total, part_acc)
        peak = tl.where(is_border, with_part[0], peak)
        total = tl.where(is_border, with_part[1], total)
        acc = tl.where(is_border, with_part[2], acc)
        part_peak = tl.where(is_border, none, part_peak)
        part_total = tl.where(is_border, nothing, part_total)
        part_acc = tl.where(is_border, zeros, part_acc)
        is_seen = None
        if position is not None:
            is_seen = is_seen_by(position, at + s, window)
        part_peak, part_total, part_acc = attend_tile(
            q, k, v, is_seen, scale, part_peak, part_total, part_acc
        )
    return add_part(peak, total, acc, part_peak, part_total, part_acc)


@jit
def first_block(keys, split, first, last, window, S: tl.constexpr):
    return block_at(keys, start_of(split, first, window, S), last, S)


@jit
def block_at(keys, key, last, S: tl.constexpr):
    """Look up the block of a key up to key `last`; 0 where there is none."""
    is_there = (key >= 0) & (key <= last)
    return tl.load(keys[2] + key // S, mask=is_there, other=0, cache_modifier=".cg")


@jit
def load_keys(keys, block, start, last, g, SIZES: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load keys and values [S, block of C] of a tile; IS_MASKED: 0 after key `last`."""
    G: tl.constexpr = SIZES[1]
    S: tl.constexpr = SIZES[2]
    C: tl.constexpr = SIZES[3]
    k_ptr, v_ptr, _ = keys
    c, s = columns(C), tl.arange(0, S)
    at = (block * G + g) * S * C + s[:, None] * C + c[None, :]
    if IS_MASKED:
        is_there = inside_columns(start + s <= last, C)
        # values are on their way while the scores are made
        k = tl.load(k_ptr + at, mask=is_there, other=0.0, cache_modifier=".cg")
        v = tl.load(v_ptr + at, mask=is_there, other=0.0, cache_modifier=".cg")
    elif block_of(C) != C:
        is_there = (c < C)[None, :]
        k = tl.load(k_ptr + at, mask=is_there, other=0.0, cache_modifier=".cg")
        v = tl.load(v_ptr + at, mask=is_there, other=0.0, cache_modifier=".cg")
    else:
        k = tl.load(k_ptr + at, cache_modifier=".cg")
        v = tl.load(v_ptr + at, cache_modifier=".cg")
    return k, v


@jit
def no_keys(ROWS: tl.constexpr, C: tl.constexpr):
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, block_of(C)), tl.float32)


@jit
def sink_of(sinks_ptr, head, inside):
    """Load the sink of each head: a score without a value, here as the kernels take powers of 2."""
    return tl.load(sinks_ptr + head, mask=inside, other=0.0) * 1.4426950408889634


@jit
def before_all(sinks_ptr, head, inside, C: tl.constexpr):
    """The partial result to which rows add all their splits: no keys, or their heads' sinks."""
    peak, total, acc = no_keys(head.shape[0], C)
    if sinks_ptr is not None:
        peak = sink_of(sinks_ptr, head, inside)
        total = tl.full((head.shape[0],), 1.0, tl.float32)
    return peak, total, acc


@jit
def attend_tile(q, k, v, is_seen, scale, peak, total, acc):
    """Take a tile of keys into a partial result.

    q: [rows, C]. k, v: [S, C]. is_seen: [rows, S], None = all.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    # scale is above 0, so the largest product is that of the largest score
    decay, _, peak = weigh(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -finite(peak)[:, None])).to(v.dtype)
    # the total through the tensor cores too: they sum in the same order in every layout
    ones = tl.full((v.shape[0], 16), 1.0, v.dtype)
    summed = tl.dot(weights, ones, input_precision="ieee")
    total = tl.fma(total, decay, tl.max(summed, axis=1))
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return peak, total, acc


@jit
def add_part(peak, total, acc, part_peak, part_total, part_acc):
    """Add a partial result of later keys to one of the same rows: acc [rows, C]."""
    decay, weight, peak = weigh(peak, part_peak)
    total = tl.fma(total, decay, part_total * weight)
    decays = tl.broadcast_to(decay[:, None], acc.shape)
    return peak, total, tl.fma(acc, decays, part_acc * weight[:, None])


@jit
def finite(peak):
    """Make a peak safe to subtract: 0 where a row has seen no key."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def weigh(peak, other):
    """Find the factors that bring two partial results to their common peak, and that peak."""
    both = tl.maximum(peak, other)
    return tl.exp2(peak - finite(both)), tl.exp2(other - finite(both)), both


class Part(NamedTuple):
    """The twin's partial result of tiles of 8 query rows: powers of e, no splits.

    peak, total: [tiles, G, heads of a group, 8, 1]. acc: [tiles, G, heads of a group, 8, C].
    """

    peak: Tensor
    total: Tensor
    acc: Tensor


def before_all_ref(
    q: Tensor, num_tiles: int, G: int, group: int, sinks_H: Tensor | None = None
) -> Part:
    """The twin of before_all. q: [tiles x G, group x 8, C]."""
    acc = q.new_zeros(num_tiles, G, group, ROWS, q.shape[-1])
    total = acc.new_zeros(*acc.shape[:-1], 1)
    if sinks_H is None:
        return Part(torch.full_like(total, -torch.inf), total, acc)
    return Part(sinks_H.view(1, G, group, 1, 1).expand_as(total), total + 1.0, acc)


def attend_tile_ref(
    q: Tensor, k: Tensor, v: Tensor, is_there: Tensor, is_seen: Tensor, part: Part
) -> Part:
    """The twin of attend_tile, for every query tile at once.

    q:        [tiles x G, group x 8, C], scaled
    k, v:     [tiles, G, S, C]
    is_there: [tiles, 1, 1, 1, S] keys whose values may be read
    is_seen:  [tiles, 1, 1, 8 or 1, S] keys that a row, or each row, attends to
    """
    num_tiles, G, S, C = k.shape
    *shape, _ = part.acc.shape
    scores = torch.bmm(q, k.reshape(-1, S, C).transpose(1, 2)).view(*shape, S)
    scores = torch.where(is_seen, scores, -torch.inf)
    peak = torch.maximum(part.peak, scores.amax(-1, keepdim=True))
    subtracted = torch.where(peak == -torch.inf, 0.0, peak)
    weights = blocked_exp(scores - subtracted)
    decay = blocked_exp(part.peak - subtracted)
    v = torch.where(is_there.view(num_tiles, 1, S, 1), v, 0.0)
    product = torch.bmm(weights.view(num_tiles * G, -1, S), v.reshape(-1, S, C))
    total = part.total * decay + tree_sum(weights)
    return Part(peak, total, part.acc * decay + product.view(part.acc.shape))
