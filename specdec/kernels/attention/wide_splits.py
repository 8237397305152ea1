"""Which splits each program of wide_walk.py takes, and which of them are left as one result."""

from specdec.kernels import jit, next_power_of_2, num_multiprocessors, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.splits import split_of, split_start
from specdec.kernels.warp_roles import ROWS


def num_sharers(given: Pass) -> int:
    """Programs for each query tile and kv head: as many as the GPU has multiprocessors for."""
    return max(num_multiprocessors(given.rows.positions.device) // num_places(given), 1)


def num_places(given: Pass) -> int:
    """Query tiles x kv heads."""
    return len(given.rows.idx_mapping) * tiles_of_slot(given) * given.heads.G


def tiles_of_slot(given: Pass) -> int:
    """Query tiles of a batch slot."""
    return -(-given.rows.max_query_len * next_power_of_2(given.heads.group) // ROWS)


@jit
def num_merged(begin, sharers):
    """Of the splits before the one of key `begin`, the first ones whose results are left as one.

    Only splits of one tile, of which there are 16. As many as one program adds up while the others
    take the rest, if to leave a result costs as much as a tile, as it does on an H200. None where
    one program takes all.
    """
    count = split_of(begin)
    rest = split_start(count) // 64 + count
    merged = tl.minimum(rest // (sharers + 1), tl.minimum(count, 16))
    return tl.where(sharers > 1, merged, 0)


@jit
def own_splits(begin, turn, sharers):
    """What a program takes of the splits before the one of key `begin`.

    The first split, how many splits before it the next one is, how many before that the one after
    it, and so on in turn: the longest ones first, back and forth. How many tiles they have in all.
    And 1 for the program whose splits are merged, which goes up from the first one; else 0.
    """
    merged = num_merged(begin, sharers)
    others = sharers - (merged > 0).to(tl.int32)
    is_merged = (turn >= others).to(tl.int32)
    split = tl.where(is_merged > 0, 0, split_of(begin) - 1 - turn)
    step = tl.where(is_merged > 0, -1, 2 * (others - turn) - 1)
    other = tl.where(is_merged > 0, -1, 2 * turn + 1)
    num_tiles = merged * is_merged
    at = tl.where(is_merged > 0, -1, split)
    jump, next_jump = step, other
    while (at >= merged) & (at >= 0):
        num_tiles += tiles_of(at)
        at -= jump
        jump, next_jump = next_jump, jump
    return split, step, other, num_tiles, is_merged


@jit
def tiles_of(split):
    """Of 64 keys."""
    return (split_start(split + 1) - split_start(split)) // 64
