"""Partial results of attention in memory: one kernel leaves them, another adds them up in order.

Each is a peak, a total and weighted values of a row (attention_splits.py). Several are loaded at
once, because a load takes longer than adding what it brings; they are added one after another, so
the bits are those of a program that adds each as soon as it has it.
"""

from specdec.kernels import jit, tl
from specdec.kernels.attention_splits import add_part, no_keys, split_of
from specdec.kernels.long_slots import place_of, rows_of_slot
from specdec.kernels.overlap import begin

PARTS_AT_ONCE = 8  # partial results on their way at a time


@jit(
    varying=(
        "positions_ptr",
        "starts_ptr",
        "query_len",
        "tiles",
        "NS",
        "B",
        "alone_keys",
        "full",
        "most",
    )
)
def _combine_kernel(
    out_ptr,  # [T, H, C]
    acc_ptr,  # [rows, H, NS, C] float32; HELPS: of the rows of long slots, else of all
    stats_ptr,  # [rows, H, NS, 2] float32
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], with HELPS and without IS_UNIFORM
    query_len,
    tiles,
    NS,
    B,
    alone_keys,
    full,
    most,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    HELPS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0)
    part_row = t
    if HELPS:
        b = t // query_len
        i = t % query_len
        start, end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
        if start + i >= end:
            return
        slots = positions_ptr, starts_ptr, B, query_len
        place = place_of(b, slots, (alone_keys, tiles * G, full, most), IS_UNIFORM, SLOTS)
        if place < 0:
            return
        t = start + i
        part_row = place * query_len + i
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, C)
    inside = head < H
    parts = acc_ptr, stats_ptr, (part_row.to(tl.int64) * H + head) * NS, inside
    peak, total, acc = no_keys(HEADS, C)
    end_of_parts = split_of(tl.load(positions_ptr + t)) + 1
    peak, total, acc = add_parts(parts, 0, end_of_parts, peak, total, acc, AT_ONCE)
    out_at = (t.to(tl.int64) * H + head)[:, None] * C + c[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=inside[:, None])


@jit
def add_parts(parts, first, end, peak, total, acc, AT_ONCE: tl.constexpr):
    """A partial result, and the stored ones of index first .. end - 1 after it, as one."""
    C: tl.constexpr = acc.shape[1]
    loaded = load_parts(parts, first, end, C, AT_ONCE)
    for start in range(first, end, AT_ONCE):
        following = load_parts(parts, start + AT_ONCE, end, C, AT_ONCE)
        for i in tl.static_range(AT_ONCE):
            new_peak, new_total, new_acc = add_part(
                peak, total, acc, loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2]
            )
            # adding an absent one would turn -0.0 into 0.0
            is_there = start + i < end
            peak = tl.where(is_there, new_peak, peak)
            total = tl.where(is_there, new_total, total)
            acc = tl.where(is_there, new_acc, acc)
        loaded = following
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
    """Of each row, the partial result of this index; of no keys where none was written."""
    acc_ptr, stats_ptr, first, inside = parts
    c = tl.arange(0, C)
    at = first + index
    wanted = inside & is_written
    peak = tl.load(stats_ptr + at * 2, mask=wanted, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=wanted, other=0.0)
    acc = tl.load(acc_ptr + at[:, None] * C + c[None, :], mask=wanted[:, None], other=0.0)
    return peak, total, acc


@jit
def store_part(parts, index, peak, total, acc, C: tl.constexpr):
    """Leave the partial result of each row for a later kernel."""
    acc_ptr, stats_ptr, first, inside = parts
    c = tl.arange(0, C)
    at = first + index
    tl.store(stats_ptr + at * 2, peak, mask=inside)
    tl.store(stats_ptr + at * 2 + 1, total, mask=inside)
    tl.store(acc_ptr + at[:, None] * C + c[None, :], acc, mask=inside[:, None])
