"""Partial results of attention in memory: one kernel leaves them, another adds them up in order.

Each is a peak, a total and weighted values of a row (attention_splits.py). Several are loaded at
once, because a load takes longer than adding what it brings; they are added one after another, so
the bits are those of a program that adds each as soon as it has it.
"""

from specdec.kernels import jit, tl
from specdec.kernels.attention_splits import add_part, no_keys, split_of
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.overlap import begin

PARTS_AT_ONCE = 8  # partial results on their way at a time


@jit(varying=("positions_ptr", "NS"))
def _combine_kernel(
    out_ptr,  # [T, H, C]
    acc_ptr,  # [T, H, NS, C] float32
    stats_ptr,  # [T, H, NS, 2] float32
    positions_ptr,  # [T]
    NS,
    needed_ptr,  # [1] or None; see needed.py
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    begin(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    parts = acc_ptr, stats_ptr, (t * H + head) * NS, head < H
    combine_row(out_ptr, t, head, tl.load(positions_ptr + t), parts, H, C, AT_ONCE)


@jit
def combine_row(
    out_ptr, t, head, position, parts, H: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Finish these heads of a row: add up its partial results. t: int64. head: several."""
    _, _, _, inside = parts
    peak, total, acc = no_keys(head.shape[0], C)
    peak, total, acc = add_parts(parts, 0, split_of(position) + 1, peak, total, acc, C, AT_ONCE)
    out_at = (t * H + head)[:, None] * C + columns(C)[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=inside_columns(inside, C))


@jit
def add_parts(parts, first, end, peak, total, acc, C: tl.constexpr, AT_ONCE: tl.constexpr):
    """A partial result, and the stored ones of index first .. end - 1 after it, as one."""
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
    c = columns(C)
    at = first + index
    wanted = inside & is_written
    peak = tl.load(stats_ptr + at * 2, mask=wanted, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=wanted, other=0.0)
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
