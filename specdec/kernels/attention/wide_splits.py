"""Which splits each program of wide_walk.py takes, and which of them are left as one result."""

from functools import cache
from heapq import heapreplace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, next_power_of_2, num_multiprocessors, tl
from specdec.kernels.attention.arguments import Pass
from specdec.kernels.attention.path_tails import TailPrograms
from specdec.kernels.attention.splits import num_splits, split_of, split_start, tiles_of_split
from specdec.kernels.warp_roles import ROWS

# Multiprocessors left for the programs of last keys, where that takes an eighth of the walk's
# programs, or less; and how many of those fit a multiprocessor. Measured on an H200.
SPARED = 20
TAILS_AT_ONCE = 2
MOST_MERGED = 16  # splits of one tile


class WalkPrograms(NamedTuple):
    """Programs for each query tile and kv head."""

    most: int  # that there are
    fewer: int  # that have splits where the last keys take long; see `num_sharing`


def walk_programs(given: Pass) -> WalkPrograms:
    """Take one for each multiprocessor, or leave some for the programs of last keys.

    Fewer, where all of these can usually run at once then, and that takes a seventh of the walk's
    programs, or less.
    """
    available, places = num_multiprocessors(given.rows.positions.device), num_places(given)
    most, spared = available // places, (available - SPARED) // places
    if 8 * spared < 7 * most or spared < 1:
        return WalkPrograms(max(most, 1), max(most, 1))
    fewer = (available - -(-_usual_tails(given) // TAILS_AT_ONCE)) // places
    return WalkPrograms(spared, fewer if 6 * spared <= 7 * fewer < 7 * spared else spared)


def _usual_tails(given: Pass) -> int:
    """Count the programs that have last keys where short paths lie in one step of 16 keys.

    In two steps, or two splits, there are twice as many.
    """
    rows = given.rows
    assert rows.paths is not None, "rows without paths"
    path_len = rows.paths.slots.shape[1]
    of_slot = TailPrograms.of(rows.max_query_len, path_len, given.heads).of_slot // 2
    return len(rows.idx_mapping) * of_slot * given.heads.G


def num_places(given: Pass) -> int:
    """Count query tiles x kv heads."""
    return len(given.rows.idx_mapping) * tiles_of_slot(given) * given.heads.G


def tiles_of_slot(given: Pass) -> int:
    """Count the query tiles of a batch slot."""
    return -(-given.rows.max_query_len * next_power_of_2(given.heads.group) // ROWS)


def num_merged(count: int, sharers: int) -> int:
    """Count the first of `count` splits whose results are left as one.

    At least one, if there are any, so that the last program always merges (`merges`).

    Only splits of one tile. Of 14 to 16 programs one adds up as many while the others take the
    rest, if to leave a result costs as much as a tile, as it does on an H200; to add one up, a
    fifth of that. Of fewer programs the others take longer, but there are more slots, whose results
    the cache may not hold: with 4 slots of 4,096 keys it pays. None where one program takes all.
    """
    if sharers == 1:
        return 0
    rest = sum(tiles_of_split(split) + 1 for split in range(count))
    return min(max((rest - sharers) // (sharers + 4), 1), count, MOST_MERGED)


def splits_by_program(count: int, sharers: int) -> list[list[int]]:
    """List which of the first `count` splits each program takes, in order.

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


def splits_of(given: Pass, sharers: WalkPrograms) -> Tensor:
    """Make the table for all that an engine's requests can have, so that its warm-up makes it."""
    rows, S = given.rows, given.constants["S"]
    assert isinstance(S, int)
    most = num_splits(rows.block_table.shape[1] * S)
    return table_of_splits(most, sharers, rows.positions.device)


@cache
def table_of_splits(most: int, sharers: WalkPrograms, device: torch.device) -> Tensor:
    """List splits, by their number up to the most and by program: [1 or 2, most + 1, sharers, any].

    How many tiles; the splits; zeros. First for all programs; then, if it is another number, for
    fewer.
    """
    rows = []
    for sharing in sorted({*sharers}, reverse=True):
        for count in range(most + 1):
            own = [*splits_by_program(count, sharing), *[[]] * (sharers.most - sharing)]
            rows += [[sum(map(tiles_of_split, each)), *each] for each in own]
    width = max(map(len, rows)) + 2
    table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int16)
    return table.view(-1, most + 1, sharers.most, width).to(device)


@jit
def num_sharing(begin, sharers, fewer):
    """Count the programs that share the splits before the one of key `begin`, of all or fewer.

    By what an H200 takes for 32 nodes and 8 kv heads, with 14 or 12 programs for each. Beside 14
    the programs for last keys take two turns, 16 us and 3 for each whole tile of the split in which
    paths begin. The walk takes 8 us, and 1 for each tile and for each result of a program: with 12
    a sixth more of these.
    """
    count = split_of(begin).to(tl.int32)
    whole = (begin - split_start(count)) // 64
    is_long = (14 + 5 * whole) * sharers > 2 * _tiles_and_results(count)
    return tl.where(is_long, fewer, sharers).to(tl.int32)


@jit
def _tiles_and_results(count):
    return split_start(count) // 64 + count


@jit
def list_at(begin, turn, sharing, sharers, counts, width):
    """Where the table has a program's splits before the one of key `begin`.

    sharing: as of `num_sharing`. counts: numbers of splits that the table knows
    """
    row = split_of(begin).to(tl.int32) + tl.where(sharing < sharers, counts, 0)
    return (row * sharers + turn) * width


@jit
def merges(turn, sharing):
    """Whether a program leaves its splits as one."""
    return (sharing > 1) & (turn == sharing - 1)


@jit
def first_split(begin, turn, sharing):
    """Find the first of a program's splits, as the table has it.

    For a program without splits, one whose block may be looked up, but is not used.
    """
    count = split_of(begin).to(tl.int32)
    return tl.where(merges(turn, sharing), 0, tl.maximum(count - 1 - turn, 0))


@jit
def merged_before(begin, sharing):
    """Count the merged splits before the one of key `begin`: `num_merged`."""
    count = split_of(begin).to(tl.int32)
    merged = tl.maximum((_tiles_and_results(count) - sharing) // (sharing + 4), 1)
    return tl.where(sharing > 1, tl.minimum(tl.minimum(merged, count), 16), 0)  # MOST_MERGED


@jit
def tiles_of(split):
    """Count the tiles of 64 keys in a split."""
    return (split_start(split + 1) - split_start(split)) // 64
