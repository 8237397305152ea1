"""Partial results of attention in memory: how kernels leave them there, and add them up in order.

Each is a peak, a total and weighted values of a row (splits.py); workspace.py says where they are.
Several are loaded at once, because a load takes longer than adding what it brings, and the powers
of 2 that bring them to common peaks are computed for all of these together. Then they are added one
after another, so the bits are those of a program that adds each as soon as it has it.
"""

from specdec.kernels import jit, tl
from specdec.kernels.attention.splits import weigh
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.kept import drop_lines, store_kept


@jit
def add_parts(
    parts,
    num_parts,
    column,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    FEW_AT_ONCE: tl.constexpr,
    MANY_AT_ONCE: tl.constexpr,
    LINE_COLUMNS: tl.constexpr,
):
    """The stored partial results of one row, as one: peak, total, and COLUMNS values from `column`.

    The bits are those of `add_part`, one after another. LINE_COLUMNS: of a line of the cache, which
    is to forget them; 0: it is not.
    """
    c = column + tl.arange(0, COLUMNS)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((COLUMNS,), tl.float32)
    if num_parts <= FEW_AT_ONCE:
        few = load_parts(parts, 0, num_parts, c, C, FEW_AT_ONCE)
        peak, total, acc = add_loaded(peak, total, acc, few, FEW_AT_ONCE)
        if LINE_COLUMNS > 0:
            drop_parts(parts, 0, num_parts, column, COLUMNS, C, FEW_AT_ONCE, LINE_COLUMNS)
    else:
        many = load_parts(parts, 0, num_parts, c, C, MANY_AT_ONCE)
        for start in range(MANY_AT_ONCE, num_parts + MANY_AT_ONCE, MANY_AT_ONCE):
            following = load_parts(parts, start, num_parts, c, C, MANY_AT_ONCE)
            peak, total, acc = add_loaded(peak, total, acc, many, MANY_AT_ONCE)
            if LINE_COLUMNS > 0:
                first = start - MANY_AT_ONCE
                drop_parts(parts, first, num_parts, column, COLUMNS, C, MANY_AT_ONCE, LINE_COLUMNS)
            many = following
    return peak, total, acc


@jit
def load_parts(parts, first, end, c, C: tl.constexpr, AT_ONCE: tl.constexpr):
    """Peaks, those before each, totals [AT_ONCE]; values [block of c] of one after another.

    From index `end` on there are parts that change nothing. Their values are -0.0: with 0.0 added,
    -0.0 would become 0.0.
    """
    _, stats_ptr, row = parts
    i = tl.arange(0, AT_ONCE)
    stats_at = stats_ptr + (row + first + i) * 2
    is_there = first + i < end
    peaks = tl.load(stats_at, mask=is_there, other=float("-inf"))
    before = tl.load(stats_at - 2, mask=(first + i <= end) & (i > 0), other=float("-inf"))
    totals = tl.load(stats_at + 1, mask=is_there, other=0.0)
    values = ()
    for part in tl.static_range(AT_ONCE):
        values = values + _values_of(parts, first + part, first + part < end, c, C)
    return peaks, before, totals, values


@jit
def _values_of(parts, index, is_there, c, C: tl.constexpr):
    """One partial result's values, or -0.0, as a tuple of one."""
    acc_ptr, _, row = parts
    minus_zero = tl.full((), -(2**31), tl.int32).to(
        tl.float32, bitcast=True
    )  # Triton reads -0.0 as 0.0
    at = acc_ptr + (row + index) * C + c
    return (tl.load(at, mask=is_there & (c < C), other=minus_zero),)


@jit
def add_loaded(peak, total, acc, loaded, AT_ONCE: tl.constexpr):
    """A partial result and those that `load_parts` found behind it."""
    peaks, before, totals, values = loaded
    before = tl.where(tl.arange(0, AT_ONCE) == 0, peak, before)
    decays, weights, peaks = weigh(tl.associative_scan(before, 0, _maximum), peaks)
    totals = totals * weights
    for i in tl.static_range(AT_ONCE):
        decay = _number(decays, i)
        total = tl.fma(total, decay, _number(totals, i))
        weighted = values[i] * _number(weights, i)
        acc = tl.fma(acc, tl.broadcast_to(decay, acc.shape), weighted)
    return tl.max(peaks, axis=0), total, acc


@jit
def _maximum(a, b):
    return tl.maximum(a, b)


@jit
def _number(x, i: tl.constexpr):
    """Element i of x."""
    return tl.max(tl.gather(x, tl.full((1,), i, tl.int32), 0), axis=0)


@jit
def load_part(parts, index, c, C: tl.constexpr):
    """The partial result of this index of a row: peak, total, and values of columns c."""
    acc_ptr, stats_ptr, row = parts
    at = row + index
    acc = tl.load(acc_ptr + at * C + c, mask=c < C, other=0.0)
    return tl.load(stats_ptr + at * 2), tl.load(stats_ptr + at * 2 + 1), acc


@jit
def store_part(parts, index, peak, total, acc, C: tl.constexpr):
    """Leave the partial result of each row for a later kernel."""
    acc_ptr, stats_ptr, first, inside = parts
    c = columns(C)
    at = first + index
    store_kept(stats_ptr + at * 2, peak, inside)
    store_kept(stats_ptr + at * 2 + 1, total, inside)
    acc_at = acc_ptr + at[:, None] * C + c[None, :]
    store_kept(acc_at, acc, inside_columns(inside, C))


@jit
def drop_parts(
    parts,
    first,
    end,
    column,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LINE_COLUMNS: tl.constexpr,
):
    """Forget values that nothing reads any more: COLUMNS from `column` on, of a row's parts.

    In a program of one warp: another might not have read them yet.
    """
    acc_ptr, _, row = parts
    LINES: tl.constexpr = COLUMNS // LINE_COLUMNS  # of a part
    i = tl.arange(0, AT_ONCE * LINES)
    part, c = first + i // LINES, column + i % LINES * LINE_COLUMNS
    drop_lines(acc_ptr + (row + part) * C + c, (part < end) & (c < C))
