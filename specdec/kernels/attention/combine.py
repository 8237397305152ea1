"""The kernels that add up partial results: of all rows, or of the rows of long slots."""

from specdec.kernels import jit, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.long_slots import last_positions, shared_slots
from specdec.kernels.attention.parts import add_parts
from specdec.kernels.attention.splits import split_of
from specdec.kernels.attention.tile_rows import rows_of_slot
from specdec.kernels.head_columns import block_of, columns
from specdec.kernels.needed import need
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.repeated import Repeated

COMBINERS = 264  # programs for long slots: two a multiprocessor
# partial results on their way at a time, of rows with few and with many; measured on an H200
FEW_AT_ONCE = 8
MANY_AT_ONCE = 16


def prepare_combine(given: Pass) -> Repeated:
    """For each row and head: one program adds up what the programs of its query tile left."""
    rows, parts, heads = given.rows, given.parts, given.heads
    return Repeated(
        _combine_kernel,
        (rows.num_rows, heads.group * heads.G, 1),
        then=(parts.acc, parts.stats, rows.positions, parts.num_splits, *need().values()),
        constants={**given.constants, "FEW": FEW_AT_ONCE, "MANY": MANY_AT_ONCE},
        options={"num_warps": 1, **given.options},
    )


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
    FEW: tl.constexpr,
    MANY: tl.constexpr,
):
    let_the_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + t, cache_modifier=".cg")
    is_needed = True
    if needed_ptr is not None:
        is_needed = tl.load(needed_ptr, cache_modifier=".cg") != 0
    wait_for_inputs(PDL)
    if is_needed:
        parts = acc_ptr, stats_ptr, (t * H + head) * NS
        combine_row(out_ptr, t, head, position, parts, H, C, FEW, MANY)


def prepare_combine_long(given: Pass) -> Repeated:
    """For the rows of long slots: add up what helpers left."""
    acc, stats, _, _, positions, starts = given.requests()
    return Repeated(
        _combine_long_kernel,
        (COMBINERS, 1, 1),
        then=(
            acc,
            stats,
            positions,
            starts,
            given.rows.max_query_len,
            given.parts.num_splits,
            *given.limits(),
            *need().values(),
        ),
        constants={
            **given.constants,
            "IS_UNIFORM": given.is_uniform,
            "SLOTS": given.plan.slots,
            "FEW": FEW_AT_ONCE,
            "MANY": MANY_AT_ONCE,
        },
        options={"num_warps": 1, **given.options},
    )


@jit(varying=("positions_ptr", "starts_ptr", "query_len", "NS", "B", "alone_keys", "most"))
def _combine_long_kernel(
    out_ptr,  # [T, H, C]
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
):
    let_the_next_start(PDL)
    last_of_slots = last_positions((positions_ptr, starts_ptr, B, query_len), IS_UNIFORM, SLOTS)
    is_shared_slot, place = shared_slots(last_of_slots, alone_keys, most)
    num_items = tl.sum(is_shared_slot.to(tl.int32), axis=0) * query_len * H
    if needed_ptr is not None:
        num_items = tl.where(tl.load(needed_ptr, cache_modifier=".cg") == 0, 0, num_items)
    wait_for_inputs(PDL)
    # each takes its items of all rows and heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part_row = item // H
        is_here = is_shared_slot & (place == part_row // query_len)
        b = tl.max(tl.where(is_here, tl.arange(0, SLOTS), 0), axis=0)
        start, end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
        t = (start + part_row % query_len).to(tl.int64)
        if t < end:
            parts = acc_ptr, stats_ptr, (part_row.to(tl.int64) * H + item % H) * NS
            position = tl.load(positions_ptr + t)
            combine_row(out_ptr, t, item % H, position, parts, H, C, FEW, MANY)


@jit
def combine_row(
    out_ptr,
    t,
    head,
    position,
    where,
    H: tl.constexpr,
    C: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
):
    """Finish one head of a row: add up its partial results. t: int64. where: their memory."""
    acc_ptr, stats_ptr, at = where
    parts = acc_ptr, stats_ptr, at, True
    num_parts = (split_of(position) + 1).to(tl.int32)
    c = columns(C)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((block_of(C),), tl.float32)
    if num_parts > 2 * FEW:
        peak, total, acc = add_parts(parts, 0, num_parts, peak, total, acc, C, MANY)
    else:
        peak, total, acc = add_parts(parts, 0, num_parts, peak, total, acc, C, FEW)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (t * H + head) * C + c, out, mask=c < C)
