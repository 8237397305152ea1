"""The kernel in which programs share the splits of several slots, in proportion to their keys.

Programs come in teams, each with one program for every place of a query tile in its slot and every
kv head. Each slot gets one team, and the others are dealt out by keys: a long slot has many, a
short one few, so that all end at about the same time. The teams of a slot take its splits in turn,
back and forth, from the last ones on, which are the longest, and leave a partial result of each
(combine.py).

There are as many programs as a GPU holds at once, so that none has to wait for others to end. Each
goes through its splits in one loop.

Where the query tiles of a launch fill the GPU, a program of walk.py takes all keys of its tile.
Only long slots have teams then: those whose last row is at position `alone_keys` or later, whatever
the others have, or would be if none of their rows were padding. The other slots are walked beside
that, and beside what adds up. Partial results have room for the rows of `most` long slots; where
more are long, they fill the GPU, and all of them are walked.

slots: positions [T], first rows [B + 1], B, rows of each slot (ragged: of the longest)
"""

from specdec.kernels import jit, next_power_of_2, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.launch_plan import teams_for
from specdec.kernels.attention.parts import store_padding, store_part
from specdec.kernels.attention.splits import (
    attend_tile,
    block_at,
    count_splits,
    first_seen,
    is_seen_by,
    load_keys,
    no_keys,
    split_of,
    split_start,
    start_of,
)
from specdec.kernels.attention.tile_rows import (
    OF_SLOTS,
    keys_of,
    load_queries,
    rows_of_slot,
    state_row_of,
    tile_of,
)
from specdec.kernels.needed import need
from specdec.kernels.overlap import begin_beside
from specdec.kernels.repeated import Repeated


def prepare_share(given: Pass) -> Repeated:
    """Share the splits of query tiles, of all slots or of long ones, among teams."""
    plan, heads = given.plan, given.heads
    teams = teams_for(plan.tile, heads, plan.is_helped)
    requests = given.requests()
    return Repeated(
        _share_splits_kernel,
        (plan.teams * plan.tiles * heads.G, 1, 1),
        then=(
            *(*requests, plan.tiles, *given.numbers(), *given.limits()),
            *(heads.window, *need().values()),
        ),
        constants={
            **given.constants,
            "IS_UNIFORM": given.is_uniform,
            "SLOTS": plan.slots,
            "GROUP": next_power_of_2(heads.group),
            "TOKENS": plan.tokens,
            "LONG": plan.is_helped,
        },
        options={
            "num_warps": teams.num_warps,
            "num_stages": teams.num_stages,
            **({} if teams.most_registers is None else {"maxnreg": teams.most_registers}),
            **given.options,
        },
    )


@jit(varying=(*OF_SLOTS, "idx_ptr", "tiles", "window"))
def _share_splits_kernel(
    q_ptr,  # [T, H, C]
    k_ptr,  # [N + 1, G, S, C]
    v_ptr,  # [N + 1, G, S, C]
    acc_ptr,  # [T, H, NS, C] float32; LONG: [most x query_len, H, NS, C]
    stats_ptr,  # the same [..., NS, 2]: peak, total
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
    window,  # keys that a row sees, or None: all
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
    LONG: tl.constexpr,  # only long slots are shared
):
    SIZES: tl.constexpr = (H, G, S, C)
    TILE: tl.constexpr = (GROUP, TOKENS)
    is_needed = True
    if needed_ptr is not None:
        is_needed = tl.load(needed_ptr, cache_modifier=".cg") != 0
    program = tl.program_id(0)
    g, tile, team = program % G, program // G % tiles, program // G // tiles
    teams = tl.num_programs(0) // G // tiles
    slots = positions_ptr, starts_ptr, B, query_len
    last_of_slots = last_positions(slots, IS_UNIFORM, SLOTS)
    if LONG:
        is_shared_slot, place = shared_slots(last_of_slots, alone_keys, most)
        last_of_slots = tl.where(is_shared_slot, last_of_slots, -1)
    num_keys = last_of_slots + 1
    if window is not None:
        num_keys = tl.minimum(num_keys, window + query_len)
    first_team, num_teams = _teams_of(num_keys, teams)
    is_here = (team >= first_team) & (team < first_team + num_teams)
    b = tl.sum(tl.where(is_here, tl.arange(0, SLOTS), 0), axis=0)
    turn = tl.sum(tl.where(is_here, team - first_team, 0), axis=0)
    sharers = tl.sum(tl.where(is_here, num_teams, 0), axis=0)
    if LONG:  # noqa: SIM102  # what is compiled
        # mostly no slot is, and no other lookup is worth its time
        if turn >= sharers:
            if program == 0:
                begin_beside(0, PDL)
            return
    row_start, row_end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
    keys = keys_of(state_row_of(b, idx_ptr), k_ptr, v_ptr, block_table_ptr, R, M)
    t, head, inside, position, first, last = tile_of(
        row_start + tile * TOKENS, row_end, g, positions_ptr, window, SIZES, TILE
    )
    is_busy = is_needed & (turn < sharers) & (row_start + tile * TOKENS < row_end)
    first_split = 0
    if window is None:
        is_busy = is_busy & (split_start(turn) <= last)
    else:
        is_busy = is_busy & (turn < count_splits(first, last, window))
        first_split = split_of(first_seen(first, window))
    if not is_busy and program > 0:
        return  # without a wait: the first program waits for all
    split = split_of(tl.maximum(last, 0)) - turn
    block = block_at(keys, start_of(split, first, window, S), last, S)
    begin_beside(0, PDL)
    if is_busy:
        q = load_queries(q_ptr, t, head, inside, H, C)
        part_row = t
        if LONG:
            rank = tl.sum(tl.where(is_here, place, 0), axis=0)
            part_row = rank * query_len + t - row_start
        parts = acc_ptr, stats_ptr, (part_row * H + head).to(tl.int64) * NS, inside
        if window is not None:  # noqa: SIM102  # what is compiled
            if turn == 0:
                store_padding(parts, positions_ptr, t, position, first_split, C)
        own = split, 2 * (sharers - turn) - 1, 2 * turn + 1
        seen = first, last, first_split, window
        _attend_own(q, keys, block, position, seen, own, parts, scale, g, SIZES)


@jit
def _teams_of(num_keys, teams):
    """Find the first team of each slot, and how many it has: 0 where num_keys is. [SLOTS]"""
    is_there = (num_keys > 0).to(tl.int32)
    num_keys = num_keys.to(tl.int64)
    others = teams - tl.sum(is_there, axis=0)
    share = others * num_keys // tl.maximum(tl.sum(num_keys, axis=0), 1)
    num_teams = is_there * (1 + share.to(tl.int32))
    return tl.cumsum(num_teams, axis=0) - num_teams, num_teams


@jit
def _attend_own(q, keys, block, position, seen, own, parts, scale, g, SIZES: tl.constexpr):
    """Leave the partial results of a program's splits, in one loop over their tiles.

    seen: the first and the last position of the rows, the first split that they see, the window.
    own: the first split; how many splits before it the next one is, and how many before that the
    one after it, and so on in turn. block: of the first split's first key. SIZES: H, G, S, C
    """
    S: tl.constexpr = SIZES[2]
    C: tl.constexpr = SIZES[3]
    first, last, first_split, window = seen
    split, step, other_step = own
    num_tiles = 0
    while split >= first_split:
        end = tl.minimum(split_start(split + 1), last + 1)
        num_tiles += ((end - start_of(split, first, window, S) + S - 1) // S).to(tl.int32)
        split -= step
        step, other_step = other_step, step
    split, step, other_step = own
    none, nothing, zeros = no_keys(q.shape[0], C)
    peak, total, acc = none, nothing, zeros
    s = tl.arange(0, S)
    at = start_of(split, first, window, S)
    for _ in range(num_tiles):
        k, v = load_keys(keys, block, at, last, g, SIZES, True)
        is_end = at + S >= tl.minimum(split_start(split + 1), last + 1)
        next_split = tl.where(is_end, split - step, split)
        next_at = tl.where(is_end, start_of(next_split, first, window, S), at + S)
        block = block_at(keys, next_at, last, S)
        is_seen = is_seen_by(position, at + s, window)
        peak, total, acc = attend_tile(q, k, v, is_seen, scale, peak, total, acc)
        if is_end:
            store_part(parts, split, peak, total, acc, C)
        peak = tl.where(is_end, none, peak)
        total = tl.where(is_end, nothing, total)
        acc = tl.where(is_end, zeros, acc)
        next_step = tl.where(is_end, other_step, step)
        other_step = tl.where(is_end, step, other_step)
        at, split, step = next_at, next_split, next_step


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
