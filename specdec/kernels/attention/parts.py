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
    """A partial result, and the stored ones of index first .. end - 1 after it, as one."""
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
    """Of each row, the partial result of this index; of no keys where none was written.

    parts: also whether each row is one; of a single row numbers, which have no layout: its peaks
    and totals are computed once, not for each layout that a tile's rows have.
    """
    acc_ptr, stats_ptr, first, inside = parts
    c = columns(C)
    at = first + index
    wanted = inside & is_written
    peak = tl.load(stats_ptr + at * 2, mask=wanted, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=wanted, other=0.0)
    if len(at.shape) == 0:
        acc = tl.load(acc_ptr + at * C + c, mask=wanted & (c < C), other=0.0)
    else:
        is_there = inside_columns(wanted, C)
        acc = tl.load(acc_ptr + at[:, None] * C + c[None, :], mask=is_there, other=0.0)
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
