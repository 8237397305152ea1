"""The query rows of a program of attention: tokens of one batch slot x query heads of a kv head.

What programs read here they may read before their wait: past the L1 cache, see overlap.py.
"""

from specdec.kernels import jit, tl
from specdec.kernels.head_columns import columns, inside_columns

# arguments of kernels of all slots that differ from call to call
OF_SLOTS = "positions_ptr", "starts_ptr", "query_len", "NS", "B", "alone_keys", "most"


@jit
def rows_of_slot(b, starts_ptr, query_len, IS_UNIFORM: tl.constexpr):
    """Find the first row of a batch slot, and the row after its last; b: one or several below B."""
    if IS_UNIFORM:
        start = b * query_len
        end = start + query_len
    else:
        start = tl.load(starts_ptr + b, cache_modifier=".cg")
        end = tl.load(starts_ptr + b + 1, cache_modifier=".cg")
    return start, end


@jit
def listed_tile(tile_ptr, starts_ptr, tokens):
    """Find the batch slot of a listed tile, its first row, and the row after the slot's last.

    tokens: rows of a listed tile, at most
    """
    b = tl.load(tile_ptr, cache_modifier=".cg")
    first_row = tl.load(tile_ptr + 1, cache_modifier=".cg")
    end = tl.load(tile_ptr + 2, cache_modifier=".cg")
    start, slot_end = rows_of_slot(b, starts_ptr, 0, False)
    is_of_slot = first_row < 0
    first_row = tl.where(is_of_slot, start - (first_row + 1) * tokens, first_row)
    return b, first_row, tl.where(is_of_slot, slot_end, end)


@jit
def rows_of_tile(first_row, row_end, g, SIZES: tl.constexpr, TILE: tl.constexpr):
    """Find a query tile's rows: row of the pass, head, whether it is one [rows].

    SIZES: H, G, S, C. TILE: GROUP, TOKENS
    """
    HEADS: tl.constexpr = SIZES[0] // SIZES[1]
    GROUP: tl.constexpr = TILE[0]
    i = tl.arange(0, TILE[1] * GROUP)
    t = first_row + i // GROUP
    return t, g * HEADS + i % GROUP, (t < row_end) & (i % GROUP < HEADS)


@jit
def tile_of(first_row, row_end, g, positions_ptr, window, SIZES: tl.constexpr, TILE: tl.constexpr):
    """Find a query tile's rows, as `rows_of_tile` does, and their positions, or -1 [rows].

    The smallest and the largest position follow; the largest is -1 without rows. With a window,
    rows of padding after a slot's own, which are at position 0, get that of the last one.
    """
    t, head, inside = rows_of_tile(first_row, row_end, g, SIZES, TILE)
    position = tl.load(positions_ptr + t, mask=inside, other=-1, cache_modifier=".cg")
    last = tl.max(position, axis=0)
    if window is not None:
        position = tl.where(inside & (position <= last - TILE[1]), last, position)
    first = tl.min(tl.where(inside, position, last), axis=0)
    return t, head, inside, position, first, last


@jit
def positions_of_paths(t, inside, positions_ptr, path_start):
    """Find the positions of rows with paths, for their windows, and the smallest one.

    Rows of padding, which are at position 0, and no rows get the largest one.
    """
    position = tl.load(positions_ptr + t, mask=inside, other=-1, cache_modifier=".cg")
    last = tl.maximum(tl.max(position, axis=0), path_start)
    position = tl.where(position < path_start, last, position)
    return position, tl.min(position, axis=0)


@jit
def state_row_of(b, idx_ptr):
    """Find the state row of a batch slot's request; -1: it has none."""
    return tl.load(idx_ptr + b, cache_modifier=".cg")


@jit
def keys_of(row, k_ptr, v_ptr, block_table_ptr, R, M):
    """Find the caches, and the blocks of the request in a state row."""
    return k_ptr, v_ptr, block_table_ptr + tl.where(row < 0, R, row) * M


@jit
def load_queries(q_ptr, t, head, inside, H: tl.constexpr, C: tl.constexpr):
    """Load the queries [rows, block of C] of a query tile."""
    q_at = (t * H + head)[:, None] * C + columns(C)[None, :]
    is_there = inside_columns(inside, C)
    return tl.load(q_ptr + q_at, mask=is_there, other=0.0, cache_modifier=".cg")
