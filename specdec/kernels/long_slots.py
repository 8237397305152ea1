"""Batch slots with so many more keys than the others that one program must not walk them alone.

Where the query tiles of a launch fill the GPU, a program walks all keys of its tile. A slot is long
if it has more than `alone_keys`, and more than its share of all keys, were they spread over the
`full` programs that fill a GPU: even batches have no long slot, however many keys they have. Fewer
than full / programs slots can be long, so their partial results need little room.

slots:  positions [T], first rows [B + 1], B, rows of each slot (ragged: of the longest)
limits: alone_keys, query tiles x kv heads of a slot, full, the most slots that there is room for
"""

from specdec.kernels import jit, tl


@jit
def rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM: tl.constexpr):
    """The first row of a batch slot, and the row after its last; b: one or several below B."""
    if IS_UNIFORM:
        start = b * query_len
        end = start + query_len
    else:
        start = tl.load(starts_ptr + b)
        end = tl.load(starts_ptr + b + 1)
    return start, end


@jit
def long_slots(slots, limits, IS_UNIFORM: tl.constexpr, SLOTS: tl.constexpr):
    """The keys of each long slot, 0 for others, and its place among the long ones. [SLOTS]"""
    positions_ptr, starts_ptr, B, query_len = slots
    alone_keys, programs, full, most = limits
    b = tl.arange(0, SLOTS)
    start, end = rows_of_slot(tl.minimum(b, B - 1), starts_ptr, query_len, IS_UNIFORM)
    has_rows = (b < B) & (start < end)
    keys = tl.load(positions_ptr + end - 1, mask=has_rows, other=-1) + 1
    share = tl.sum(keys, axis=0) * programs // full
    is_long = keys > tl.maximum(share, alone_keys)
    place = tl.cumsum(is_long.to(tl.int32), axis=0) - 1
    return tl.where(is_long & (place < most), keys, 0), place


@jit
def place_of(b, slots, limits, IS_UNIFORM: tl.constexpr, SLOTS: tl.constexpr):
    """The place of slot b, which has rows, among the long ones; -1 where it is not long."""
    positions_ptr, starts_ptr, _, query_len = slots
    _, end = rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM)
    found = -1
    if tl.load(positions_ptr + end - 1) >= limits[0]:  # else the others need not be looked at
        keys, place = long_slots(slots, limits, IS_UNIFORM, SLOTS)
        is_here = (tl.arange(0, SLOTS) == b) & (keys > 0)
        found = tl.max(tl.where(is_here, place, -1), axis=0)
    return found
