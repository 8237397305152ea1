"""The kernels that add up partial results: of all rows, or of the rows of long slots."""

from math import prod

import torch

from specdec.kernels import jit, num_multiprocessors, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.launch_plan import COLUMNS
from specdec.kernels.attention.parts import add_parts, columns_of_lanes, drop_parts, load_parts
from specdec.kernels.attention.shared_splits import last_positions, shared_slots
from specdec.kernels.attention.splits import add_part, first_seen, sink_of, split_of
from specdec.kernels.attention.tile_rows import OF_SLOTS, rows_of_slot
from specdec.kernels.attention.wide_splits import merged_before, num_sharing, walk_programs
from specdec.kernels.head_columns import block_of
from specdec.kernels.kept import LINE, store_kept
from specdec.kernels.needed import need
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs, wait_for_inputs_knowing
from specdec.kernels.repeated import Repeated

COMBINERS = 264  # programs for long slots: two a multiprocessor
# measured on an H200
FEW_AT_ONCE = 8  # partial results that are loaded together, for rows that have no more
MANY_AT_ONCE = 16  # for all other rows
# Programs that add up begin while the last ones that share splits end, and would crowd the
# multiprocessors that happen to be free: 128 of them were seen on 23 of 132. So each reserves a
# part of the shared memory that the others leave, and few fit one multiprocessor. With more
# programs than this it costs more than it brings, except after wide_walk.py, beside whose programs
# there is no room. Measured on an H200.
FEW_PROGRAMS, LEFT, MOST_RESERVED = 512, 100 * 1024, 48 * 1024  # bytes of a multiprocessor
ALL = 227 * 1024  # that a program of a Hopper GPU can have


def prepare_combine(given: Pass) -> Repeated:
    """Add up, for each row and head, what the programs of its query tile left."""
    rows, parts, heads = given.rows, given.parts, given.heads
    grid = rows.num_rows, heads.group * heads.G, -(-heads.C // given.plan.columns)
    path_starts = rows.positions if rows.paths is None else rows.paths.starts
    tensors = parts.acc, parts.stats, rows.positions, path_starts
    lengths = rows.max_query_len, len(rows.idx_mapping)
    programs = walk_programs(given) if given.plan.is_wide else (None, None)
    return Repeated(
        _combine_kernel,
        grid,
        then=(*tensors, *lengths, *programs, parts.num_splits, heads.window, *need().values()),
        constants={
            **given.constants,
            "IS_SUMMED": not given.plan.is_split,
            "FEW": FEW_AT_ONCE,
            "MANY": MANY_AT_ONCE,
            "COLUMNS": given.plan.columns,
            "LINE_COLUMNS": line_columns(given),
        },
        options={"num_warps": 1, **given.options},
        shared_bytes=_reserved(prod(grid), given.plan.is_wide, parts.acc.device),
    )


def line_columns(given: Pass) -> int:
    """Count the values in a line of the cache, which forgets what was added up; 0: it does not.

    It does on GPUs that overlap kernels (overlap.py), if a partial result is whole lines.
    """
    row = given.heads.C * given.parts.acc.itemsize
    is_aligned = row % LINE == 0 and given.parts.acc.data_ptr() % LINE == 0
    return LINE // given.parts.acc.itemsize if given.constants["PDL"] and is_aligned else 0


def _reserved(num_programs: int, is_wide: bool, device: torch.device) -> int:
    """Count bytes of shared memory that keep a multiprocessor near its share of the programs.

    is_wide: after wide_walk.py, where all of it is theirs
    """
    if device.type != "cuda" or (num_programs > FEW_PROGRAMS and not is_wide):
        return 0
    share = -(-num_programs // num_multiprocessors(device))
    return min((ALL if is_wide else LEFT) // (share + 1), MOST_RESERVED)


OF_ROWS = "positions_ptr", "path_starts_ptr", "query_len", "B", "sharers", "fewer", "NS"


@jit(varying=(*OF_ROWS, "window", "sinks_ptr"))
def _combine_kernel(
    out_ptr,  # [T, H, C]
    sinks_ptr,  # [H] float32, or None
    acc_ptr,  # [T, H, NS, C] float32
    stats_ptr,  # [T, H, NS, 2] float32
    positions_ptr,  # [T]
    path_starts_ptr,  # [B], with sharers
    query_len,
    B,
    sharers,  # of wide_walk.py, or None, as the next; see wide_splits.py
    fewer,
    NS,
    window,  # keys that a row sees, or None: all
    needed_ptr,  # [1] or None; see needed.py
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_COLUMNS: tl.constexpr,
):
    PART: tl.constexpr = (COLUMNS, C, LINE_COLUMNS)
    AT_ONCE: tl.constexpr = (FEW, MANY)
    let_the_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + t, cache_modifier=".cg").to(tl.int32)
    is_needed = True
    if needed_ptr is not None:
        is_needed = tl.load(needed_ptr, cache_modifier=".cg") != 0
    first = tl.full((), 0, tl.int32)  # of the partial results
    if sharers is not None:
        # rows after those of all slots have the last one's
        b = tl.minimum(tl.program_id(0) // query_len, B - 1)
        begin = tl.load(path_starts_ptr + b, cache_modifier=".cg").to(tl.int32)
        merged = merged_before(begin, num_sharing(begin, sharers, fewer))
        first = tl.maximum(merged - 1, 0)
    if window is not None and not IS_SUMMED:
        first = split_of(first_seen(position, window)).to(tl.int32)
    # a row of padding may end before the first
    num_parts = tl.maximum(parts_of(position) - first, 1)
    sink = None
    if sinks_ptr is not None:  # with IS_SUMMED the walk began with it
        sink = sink_of(sinks_ptr, head, True)
    wait_for_inputs_knowing(first, num_parts, PDL)
    if is_needed:
        column = tl.program_id(2) * COLUMNS
        parts = acc_ptr, stats_ptr, (t * H + head) * NS + first
        if IS_SUMMED:
            total, acc = add_last_parts(parts, column, PART)
        else:
            total, acc = add_parts(parts, num_parts, column, sink, PART, AT_ONCE, PDL)
        if window is not None:  # a row of padding may see no key
            total = tl.where(total == 0.0, 1.0, total)
        store_row(out_ptr, t * H + head, total, acc, column, COLUMNS, C)


def prepare_combine_long(given: Pass) -> Repeated:
    """Add up, for the rows of long slots, what teams left."""
    acc, stats, _, _, positions, starts = given.requests()
    tensors = acc, stats, positions, starts
    lengths = given.rows.max_query_len, given.parts.num_splits
    return Repeated(
        _combine_long_kernel,
        (COMBINERS, 1, 1),
        then=(*tensors, *lengths, *given.limits(), *need().values()),
        constants={
            **given.constants,
            "IS_UNIFORM": given.is_uniform,
            "SLOTS": given.plan.slots,
            "FEW": FEW_AT_ONCE,
            "MANY": MANY_AT_ONCE,
            "COLUMNS": min(COLUMNS, block_of(given.heads.C)),
            "LINE_COLUMNS": line_columns(given),
        },
        options={"num_warps": 1, **given.options},
    )


@jit(varying=(*OF_SLOTS, "sinks_ptr"))
def _combine_long_kernel(
    out_ptr,  # [T, H, C]
    sinks_ptr,  # [H] float32, or None
    acc_ptr,  # [most x query_len, H, NS, C] float32
    stats_ptr,  # [most x query_len, H, NS, 2] float32
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without IS_UNIFORM
    query_len,
    NS,
    B,
    alone_keys,
    most,
    needed_ptr,  # [1] or None; see needed.py
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_COLUMNS: tl.constexpr,
):
    PART: tl.constexpr = (COLUMNS, C, LINE_COLUMNS)
    AT_ONCE: tl.constexpr = (FEW, MANY)
    let_the_next_start(PDL)
    last_of_slots = last_positions((positions_ptr, starts_ptr, B, query_len), IS_UNIFORM, SLOTS)
    is_shared_slot, place = shared_slots(last_of_slots, alone_keys, most)
    heads = H * ((C + COLUMNS - 1) // COLUMNS)  # and columns of each
    num_items = tl.sum(is_shared_slot.to(tl.int32), axis=0) * query_len * heads
    if needed_ptr is not None:
        num_items = tl.where(tl.load(needed_ptr, cache_modifier=".cg") == 0, 0, num_items)
    wait_for_inputs(PDL)
    # each takes its items of all rows and heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part_row = item // heads
        is_here = is_shared_slot & (place == part_row // query_len)
        b = tl.max(tl.where(is_here, tl.arange(0, SLOTS), 0), axis=0)
        start, end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
        t = (start + part_row % query_len).to(tl.int64)
        if t < end:
            head = item % H
            column = item % heads // H * COLUMNS
            parts = acc_ptr, stats_ptr, (part_row.to(tl.int64) * H + head) * NS
            num_parts = parts_of(tl.load(positions_ptr + t))
            sink = None
            if sinks_ptr is not None:
                sink = sink_of(sinks_ptr, head, True)
            total, acc = add_parts(parts, num_parts, column, sink, PART, AT_ONCE, PDL)
            store_row(out_ptr, t * H + head, total, acc, column, COLUMNS, C)


@jit
def parts_of(position):
    """Count the partial results of a row: one of each split up to its position."""
    return (split_of(position) + 1).to(tl.int32)


@jit
def add_last_parts(parts, column, PART: tl.constexpr):
    """Add up a path's row: the splits before the one in which it begins, which are one, and the
    rest.

    The first is taken as it is: added to nothing, -0.0 would be 0.0. The rest as in `add_parts`.
    """
    loaded = load_parts(parts, 0, 3, column, PART, 3)
    peak, total, acc = loaded[0]
    for i in tl.static_range(1, 3):
        part_peak, part_total, values = loaded[i]
        is_there = part_peak != float("-inf")
        new_peak, new_total, new_acc = add_part(peak, total, acc, part_peak, part_total, values)
        peak = tl.where(is_there, new_peak, peak)
        total = tl.where(is_there, new_total, total)
        acc = tl.where(is_there[:, None], new_acc, acc)
    if PART[2] > 0:
        drop_parts(parts, 0, 3, column, PART, 4)
    return total[:, None], acc


@jit
def store_row(out_ptr, row, total, acc, column, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Store columns from `column` on of one head of a row. row: of [T x H], int64"""
    c = columns_of_lanes(column, COLUMNS)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    store_kept(out_ptr + row * C + c, out, c < C)
