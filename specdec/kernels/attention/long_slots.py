"""Batch slots with too many keys for one program to walk them alone.

Where the query tiles of a launch fill the GPU, a program walks all keys of its tile. A slot is long
if the position of its last row is `alone_keys` or more, whatever the others have, or would be if
none of its rows were padding. A kernel shares the splits of long slots, one in combine.py adds them
up, and beside both walk the programs of all other slots. The two look at the last positions of all
slots and end at once where none is long.

Partial results have room for the rows of `most` long slots; where more are long, they fill the GPU,
and all of them walk alone.

slots: positions [T], first rows [B + 1], B, rows of each slot (ragged: of the longest)
"""

from specdec.kernels import jit, next_power_of_2, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.launch_plan import is_small, stages_of_long_loops
from specdec.kernels.attention.parts import store_part
from specdec.kernels.attention.splits import attend_split, split_of
from specdec.kernels.attention.tile_rows import (
    keys_of,
    load_queries,
    rows_of_slot,
    state_row_of,
    tile_of,
)
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin_beside
from specdec.kernels.repeated import Repeated

# Programs that share the splits of long slots, and the warps of each: three a multiprocessor where
# these hold a tile of queries and one of keys; else two. Measured on an H200.
SMALL_HELPERS = 396, 2
HELPERS = 264, 4


def prepare_share_long(given: Pass) -> Repeated:
    """Share the splits of long slots' query tiles among programs, which leave partial results."""
    plan, heads = given.plan, given.heads
    helpers, num_warps = SMALL_HELPERS if is_small(plan.tile, heads) else HELPERS
    return Repeated(
        _share_long_kernel,
        (helpers, 1, 1),
        then=(
            *given.requests(),
            plan.tiles,
            *given.numbers(),
            *given.limits(),
            *need().values(),
        ),
        constants={
            **given.constants,
            "IS_UNIFORM": given.is_uniform,
            "SLOTS": plan.slots,
            "GROUP": next_power_of_2(heads.group),
            "TOKENS": plan.tokens,
            "SKIP": plan.tile.skips_masks,
        },
        options={
            "num_warps": num_warps,
            "num_stages": stages_of_long_loops(heads, looks_up=True),
            **given.options,
        },
    )


@jit(
    varying=(
        "idx_ptr",
        "positions_ptr",
        "starts_ptr",
        "tiles",
        "query_len",
        "NS",
        "B",
        "alone_keys",
        "most",
    )
)
def _share_long_kernel(
    q_ptr,  # [T, H, C]
    k_ptr,  # [N + 1, G, S, C]
    v_ptr,  # [N + 1, G, S, C]
    acc_ptr,  # [most x query_len, H, NS, C] float32
    stats_ptr,  # [most x query_len, H, NS, 2] float32: peak, total
    block_table_ptr,  # [R + 1, M]
    idx_ptr,  # [B]
    positions_ptr,  # [T]
    starts_ptr,  # [B + 1], without IS_UNIFORM
    tiles,
    query_len,
    R,
    M,
    NS,
    scale,
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
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SKIP: tl.constexpr,
):
    slots = positions_ptr, starts_ptr, B, query_len
    last_of_slots = last_positions(slots, IS_UNIFORM, SLOTS)
    is_shared_slot, place = shared_slots(last_of_slots, alone_keys, most)
    last_of_slots = tl.where(is_shared_slot, last_of_slots, -1)
    in_turn = tl.sum(is_shared_slot.to(tl.int32), axis=0) * tiles * G
    if needed_ptr is not None:
        in_turn = tl.where(tl.load(needed_ptr, cache_modifier=".cg") == 0, 0, in_turn)
    shared = last_of_slots, place, in_turn, tiles
    num_items = (split_of(tl.maximum(tl.max(last_of_slots, axis=0), 0)) + 1) * in_turn
    programs = tl.num_programs(0)
    begin_beside(0, PDL)
    # Each takes its items of all splits, query tiles and kv heads. First come the last splits of
    # all slots, which are the longest, then those before them; every other round of items goes
    # backwards: a program that had more keys then has fewer.
    for start in range(0, num_items, programs):
        is_back = start // programs % 2 == 1
        item = start + tl.where(is_back, programs - 1 - tl.program_id(0), tl.program_id(0))
        if item < num_items:
            rank, b, split, tile, g = _place_of(item, shared, G, SLOTS)
            # padding may reach beyond the longest context, and a split further
            if (split >= 0) & (split < NS):
                row_start, row_end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
                t, head, inside, position, first, last = tile_of(
                    row_start + tile * TOKENS, row_end, g, positions_ptr, H, G, GROUP, TOKENS
                )
                q = load_queries(q_ptr, t, head, inside, H, C)
                keys = keys_of(state_row_of(b, idx_ptr), k_ptr, v_ptr, block_table_ptr, R, M)
                peak, total, acc = attend_split(
                    q, keys, None, position, first, last, split, scale, g, G, S, C, SKIP
                )
                part_row = rank * query_len + t - row_start
                part_at = (part_row.to(tl.int64) * H + head) * NS
                store_part((acc_ptr, stats_ptr, part_at, inside), split, peak, total, acc, C)


@jit
def _place_of(item, shared, G: tl.constexpr, SLOTS: tl.constexpr):
    """Find an item's slot among the long ones and among all, its split, query tile and kv head.

    The split is negative where the slot has fewer than others.
    """
    last_of_slots, place, in_turn, tiles = shared
    rank = item % in_turn // (tiles * G)
    is_here = (last_of_slots >= 0) & (place == rank)
    b = tl.max(tl.where(is_here, tl.arange(0, SLOTS), 0), axis=0)
    last = tl.max(tl.where(is_here, last_of_slots, -1), axis=0)
    return rank, b, split_of(last) - item // in_turn, item // G % tiles, item % G


@jit
def is_shared(
    slots, row_start, row_end, alone_keys, most, IS_UNIFORM: tl.constexpr, SLOTS: tl.constexpr
):
    """Whether the slot that has these rows is long, and long slots are few enough to be shared."""
    positions_ptr, _, _, _ = slots
    first = tl.load(positions_ptr + row_start, cache_modifier=".cg")
    found = first + row_end - row_start > alone_keys
    if found:  # else the others need not be looked at
        is_long = last_positions(slots, IS_UNIFORM, SLOTS) >= alone_keys
        found = tl.sum(is_long.to(tl.int32), axis=0) <= most
    return found


@jit
def last_positions(slots, IS_UNIFORM: tl.constexpr, SLOTS: tl.constexpr):
    """Find the position of each slot's last row; -1 where it has no rows. [SLOTS]

    It is that of its first row plus the rows after it, since the last ones may be padding.
    """
    positions_ptr, starts_ptr, B, query_len = slots
    b = tl.arange(0, SLOTS)
    start, end = rows_of_slot(tl.minimum(b, B - 1), starts_ptr, query_len, IS_UNIFORM)
    has_rows = (b < B) & (start < end)
    first = tl.load(positions_ptr + start, mask=has_rows, other=0, cache_modifier=".cg")
    return tl.where(has_rows, first + end - start, 0) - 1


@jit
def shared_slots(last, alone_keys, most):
    """Find which slots are long and shared, and the place of each among them. [SLOTS]"""
    is_long = (last >= alone_keys).to(tl.int32)
    is_few = tl.sum(is_long, axis=0) <= most
    return (is_long > 0) & is_few, tl.cumsum(is_long, axis=0) - 1
