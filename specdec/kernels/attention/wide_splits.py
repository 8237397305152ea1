"""Which splits each program of wide_walk.py takes, and which of them are left as one result."""

from functools import cache
from heapq import heapreplace

import torch
from torch import Tensor

from specdec.kernels import jit, next_power_of_2, num_multiprocessors, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.splits import num_splits, split_of, split_start, tiles_of_split
from specdec.kernels.warp_roles import ROWS

# Multiprocessors left for the programs of last keys, where that takes an eighth of the walk's
# programs, or less. Measured on an H200.
SPARED = 20
MOST_MERGED = 16  # splits of one tile


def num_sharers(given: Pass) -> int:
    """Programs for each query tile and kv head: one for each multiprocessor, or some are left."""
    available, places = num_multiprocessors(given.rows.positions.device), num_places(given)
    most, fewer = available // places, (available - SPARED) // places
    return max(fewer if 8 * fewer >= 7 * most else most, 1)


def num_places(given: Pass) -> int:
    """Query tiles x kv heads."""
    return len(given.rows.idx_mapping) * tiles_of_slot(given) * given.heads.G


def tiles_of_slot(given: Pass) -> int:
    """Query tiles of a batch slot."""
    return -(-given.rows.max_query_len * next_power_of_2(given.heads.group) // ROWS)


def num_merged(count: int, sharers: int) -> int:
    """Of so many splits, the first ones whose results are left as one.

    At least one, if there are any, so that the last program always merges (`merges`).

    Only splits of one tile. Of 14 to 16 programs one adds up as many while the others take the
    rest, if to leave a result costs as much as a tile, as it does on an H200; to add one up, a
    fifth of that. Of fewer programs the others take longer, but there are more slots, whose results
    the cache may not hold: with 4 slots behind 4,096 keys it pays. None where one program takes
    all.
    """
    if sharers == 1:
        return 0
    rest = sum(tiles_of_split(split) + 1 for split in range(count))
    return min(max((rest - sharers) // (sharers + 4), 1), count, MOST_MERGED)


def shares(count: int, sharers: int) -> list[list[int]]:
    """Which of the first `count` splits each program takes, in order.

    The longest ones first, each by the program that has least so far. The merged ones are the last
    program's, which goes up from the first one.
    """
    merged = num_merged(count, sharers)
    own: list[list[int]] = [[] for _ in range(sharers - (merged > 0))]
    loads = [(0, i) for i in range(len(own))]
    for split in reversed(range(merged, count)):
        load, i = loads[0]
        own[i].append(split)
        heapreplace(loads, (load + tiles_of_split(split) + 1, i))
    return [*own, list(range(merged))] if merged else own


def shares_of(given: Pass, sharers: int) -> Tensor:
    """The table for all that an engine's requests can have, so that its warm-up makes it."""
    rows, S = given.rows, given.constants["S"]
    assert isinstance(S, int)
    most = num_splits(rows.block_table.shape[1] * S)
    return table_of_shares(most, sharers, rows.positions.device)


@cache
def table_of_shares(most: int, sharers: int, device: torch.device) -> Tensor:
    """For each number of splits up to the most, and each program: [most + 1, sharers, any].

    How many tiles; the splits; zeros.
    """
    of_counts = [shares(count, sharers) for count in range(most + 1)]
    width = 1 + max(len(own) for each in of_counts for own in each) + 2
    rows = []
    for each in of_counts:
        for own in each:
            row = [sum(map(tiles_of_split, own)), *own]
            rows.append(row + [0] * (width - len(row)))
    table = torch.tensor(rows, dtype=torch.int16).view(most + 1, sharers, width)
    return table.to(device)


@jit
def share_at(begin, turn, sharers, width):
    """Where the table has a program's share of the splits before the one of key `begin`."""
    return (split_of(begin).to(tl.int32) * sharers + turn) * width


@jit
def merges(turn, sharers):
    """Whether a program leaves its splits as one."""
    return (sharers > 1) & (turn == sharers - 1)


@jit
def first_split(begin, turn, sharers):
    """The first one of a program's share, as the table has it.

    For a share without splits, one whose block may be looked up, but is not used.
    """
    count = split_of(begin).to(tl.int32)
    return tl.where(merges(turn, sharers), 0, tl.maximum(count - 1 - turn, 0))


@jit
def merged_before(begin, sharers):
    """How many splits before the one of key `begin` are merged: `num_merged`."""
    count = split_of(begin).to(tl.int32)
    rest = split_start(count) // 64 + count
    merged = tl.maximum((rest - sharers) // (sharers + 4), 1)
    return tl.where(sharers > 1, tl.minimum(tl.minimum(merged, count), 16), 0)  # MOST_MERGED


@jit
def tiles_of(split):
    """Of 64 keys."""
    return (split_start(split + 1) - split_start(split)) // 64
