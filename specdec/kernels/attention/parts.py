"""Partial results of attention in memory: how kernels leave them there, and add them up in order.

Each is a peak, a total and weighted values of a row (splits.py); workspace.py says where they are.
Several are loaded at once, because a load takes longer than adding what it brings; they are added
one after another, so the bits are those of a program that adds each as soon as it has it.
"""

from specdec.kernels import jit, tl
from specdec.kernels.attention.splits import add_part
from specdec.kernels.head_columns import columns, inside_columns


@jit
def add_parts(parts, first, end, peak, total, acc, C: tl.constexpr, AT_ONCE: tl.constexpr):
    """A partial result of one row, and the stored ones of index first .. end - 1, as one.

    Peak and total are numbers, acc is [block of C]: rows of a tile would have layouts, and the same
    peaks would be computed for each of them.
    """
    loaded = load_parts(parts, first, end, C, AT_ONCE)
    whole = end - (end - first) % AT_ONCE
    for start in range(first, whole, AT_ONCE):
        following = load_parts(parts, start + AT_ONCE, end, C, AT_ONCE)
        for i in tl.static_range(AT_ONCE):
            peak, total, acc = add_part(
                peak, total, acc, loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2]
            )
        loaded = following
    if whole < end:
        for i in tl.static_range(AT_ONCE):
            new_peak, new_total, new_acc = add_part(
                peak, total, acc, loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2]
            )
            # adding an absent one would turn -0.0 into 0.0
            is_there = whole + i < end
            peak = tl.where(is_there, new_peak, peak)
            total = tl.where(is_there, new_total, total)
            acc = tl.where(is_there, new_acc, acc)
    return peak, total, acc


@jit
def load_parts(parts, first, end, C: tl.constexpr, AT_ONCE: tl.constexpr):
    """Peak, total and values of one partial result after another; of no keys from index end on."""
    loaded = ()
    for i in tl.static_range(AT_ONCE):
        loaded = loaded + load_part(parts, first + i, first + i < end, C)
    return loaded


@jit
def load_part(parts, index, is_written, C: tl.constexpr):
    """The partial result of this index of a row; of no keys where none was written."""
    acc_ptr, stats_ptr, first = parts
    c = columns(C)
    at = first + index
    peak = tl.load(stats_ptr + at * 2, mask=is_written, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=is_written, other=0.0)
    acc = tl.load(acc_ptr + at * C + c, mask=is_written & (c < C), other=0.0)
    return peak, total, acc


@jit
def store_part(parts, index, peak, total, acc, C: tl.constexpr):
    """Leave the partial result of each row for a later kernel."""
    acc_ptr, stats_ptr, first, inside = parts
    c = columns(C)
    at = first + index
    tl.store(stats_ptr + at * 2, peak, mask=inside)
    tl.store(stats_ptr + at * 2 + 1, total, mask=inside)
    tl.store(acc_ptr + at[:, None] * C + c[None, :], acc, mask=inside_columns(inside, C))
