"""Partial results of attention in memory: how kernels leave them there, and add them up in order.

Each is a peak, a total and weighted values of a row (splits.py); arguments.py says where they are.
Several are loaded at once, because a load takes longer than adding what it brings. Then they are
added one after another, so the bits are those of a program that adds each as soon as it has it.
"""

from specdec.kernels import constexpr_function, jit, tl
from specdec.kernels.attention.splits import add_part, split_of
from specdec.kernels.head_columns import block_of, columns, inside_columns
from specdec.kernels.kept import drop_lines, store_kept
from specdec.kernels.overlap import loads_come_first


@jit
def add_parts(
    parts, num_parts, column, sink, PART: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):
    """Add up the stored partial results of one row, to one without its peak.

    Totals [lanes, 1], values [lanes, COLUMNS // lanes] from `column` on: each lane of a warp has
    peaks and totals beside its own columns, so that no number changes lanes. The bits are those of
    `add_part`, one after another. PART: COLUMNS, C, and columns of a line of the cache, which is to
    forget them; 0: it is not. AT_ONCE: of few parts, and of many. sink: of the row's head, or None.
    """
    COLUMNS: tl.constexpr = PART[0]
    FEW: tl.constexpr = AT_ONCE[0]
    MANY: tl.constexpr = AT_ONCE[1]
    LANES: tl.constexpr = lanes_of(COLUMNS)
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    if sink is not None:
        total = tl.full((LANES,), 1.0, tl.float32)
        peak = total * sink
    acc = tl.zeros((LANES, COLUMNS // LANES), tl.float32)
    if num_parts <= FEW:
        few = load_parts(parts, 0, num_parts, column, PART, FEW)
        peak, total, acc = add_loaded(peak, total, acc, few, FEW, PDL)
        if PART[2] > 0:
            drop_parts(parts, 0, num_parts, column, PART, FEW)
    else:
        many = load_parts(parts, 0, num_parts, column, PART, MANY)
        for start in range(MANY, num_parts + MANY, MANY):
            following = load_parts(parts, start, num_parts, column, PART, MANY)
            peak, total, acc = add_loaded(peak, total, acc, many, MANY, PDL)
            if PART[2] > 0:
                drop_parts(parts, start - MANY, num_parts, column, PART, MANY)
            many = following
    return total[:, None], acc


@constexpr_function
def lanes_of(COLUMNS):
    return min(COLUMNS, 32)


@jit
def columns_of_lanes(column, COLUMNS: tl.constexpr):
    """Lay out the columns of each lane: [lanes, COLUMNS // lanes]."""
    LANES: tl.constexpr = lanes_of(COLUMNS)
    EACH: tl.constexpr = COLUMNS // LANES
    lane, each = tl.arange(0, LANES), tl.arange(0, EACH)
    return column + lane[:, None] * EACH + each[None, :]


@jit
def load_parts(parts, first, end, column, PART: tl.constexpr, AT_ONCE: tl.constexpr):
    """Load parts: of each its peak and total [lanes], values [lanes, columns of each].

    From index `end` on parts change nothing.
    """
    loaded = ()
    for i in tl.static_range(AT_ONCE):
        loaded = loaded + _load_part(parts, first + i, first + i < end, column, PART)
    return loaded


@jit
def _load_part(parts, index, is_there, column, PART: tl.constexpr):
    """Load a part in a tuple. Absent values are -0.0: with 0.0 added, -0.0 would become 0.0."""
    COLUMNS: tl.constexpr = PART[0]
    C: tl.constexpr = PART[1]
    acc_ptr, stats_ptr, row = parts
    at = row + index + tl.arange(0, lanes_of(COLUMNS)) * 0
    peak = tl.load(stats_ptr + at * 2, mask=is_there, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=is_there, other=0.0)
    # Triton reads -0.0 as 0.0
    minus_zero = tl.full((), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    c = columns_of_lanes(column, COLUMNS)
    values = tl.load(acc_ptr + at[:, None] * C + c, mask=is_there & (c < C), other=minus_zero)
    return ((peak, total, values),)


@jit
def add_loaded(peak, total, acc, loaded, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """Add parts that `load_parts` found after a partial result."""
    if loads_come_first(PDL):
        for i in tl.static_range(AT_ONCE):
            peak, total, acc = add_part(peak, total, acc, *loaded[i])
    return peak, total, acc


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
def store_padding(parts, positions_ptr, t, position, first_split, C: tl.constexpr):
    """Leave zeros for rows of padding whose positions no split reaches: combine.py looks there.

    position: [rows] as `tile_of` has it
    """
    acc_ptr, stats_ptr, first, inside = parts
    found = tl.load(positions_ptr + t, mask=inside, other=0, cache_modifier=".cg")
    split = split_of(found)
    is_padding = inside & (found < position) & (split < first_split)
    ones, zeros = tl.full(t.shape, 1.0, tl.float32), tl.zeros((t.shape[0], block_of(C)), tl.float32)
    store_part((acc_ptr, stats_ptr, first, is_padding), split, ones, ones, zeros, C)


@jit
def drop_parts(parts, first, end, column, PART: tl.constexpr, AT_ONCE: tl.constexpr):
    """Forget values that nothing reads any more: COLUMNS from `column` on, of a row's parts.

    A program of one warp must do it: another warp might not have read them yet.
    """
    acc_ptr, _, row = parts
    C: tl.constexpr = PART[1]
    LINES: tl.constexpr = PART[0] // PART[2]  # of a part
    i = tl.arange(0, AT_ONCE * LINES)
    part, c = first + i // LINES, column + i % LINES * PART[2]
    drop_lines(acc_ptr + (row + part) * C + c, (part < end) & (c < C))
