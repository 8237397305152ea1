"""The kernels that add up partial results: of all rows, or of the rows of long slots."""

from specdec.kernels import jit, next_power_of_2, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.long_slots import last_positions, shared_slots
from specdec.kernels.attention.parts import PARTS_AT_ONCE, add_parts
from specdec.kernels.attention.splits import no_keys, split_of
from specdec.kernels.attention.tile_rows import rows_of_slot
from specdec.kernels.head_columns import columns, inside_columns
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin
from specdec.kernels.repeated import Repeated

COMBINERS = 264  # programs for long slots: two a multiprocessor


def prepare_combine(given: Pass) -> Repeated:
    """For each row and head: one program adds up what the programs of its query tile left."""
    rows, parts, heads = given.rows, given.parts, given.heads
    return Repeated(
        _combine_kernel,
        (rows.num_rows, heads.group * heads.G, 1),
        then=(parts.acc, parts.stats, rows.positions, parts.num_splits, *need().values()),
        constants={**given.constants, "AT_ONCE": PARTS_AT_ONCE},
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


def prepare_combine_long(given: Pass) -> Repeated:
    """For the rows of long slots: add up what helpers left."""
    num_heads = next_power_of_2(given.heads.group)
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
            "HEADS": num_heads,
            "AT_ONCE": PARTS_AT_ONCE,
        },
        options={"num_warps": min(num_heads, 4), **given.options},
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
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    begin(PDL)
    if needed_ptr is not None:  # noqa: SIM102  # what is compiled
        if tl.load(needed_ptr) == 0:
            return
    last_of_slots = last_positions((positions_ptr, starts_ptr, B, query_len), IS_UNIFORM, SLOTS)
    if tl.max(last_of_slots, axis=0) < alone_keys:
        return
    is_shared_slot, place = shared_slots(last_of_slots, alone_keys, most)
    num_items = tl.sum(is_shared_slot.to(tl.int32), axis=0) * query_len * G
    # each takes its items of all rows and kv heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part_row = item // G
        is_here = is_shared_slot & (place == part_row // query_len)
        b = tl.max(tl.where(is_here, tl.arange(0, SLOTS), 0), axis=0)
        start, end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
        t = (start + part_row % query_len).to(tl.int64)
        if t < end:
            i = tl.arange(0, HEADS)
            head = item % G * (H // G) + i
            at = (part_row.to(tl.int64) * H + head) * NS
            parts = acc_ptr, stats_ptr, at, i < H // G
            position = tl.load(positions_ptr + t)
            combine_row(out_ptr, t, head, position, parts, H, C, AT_ONCE)


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
