"""Which kernel serves a pass, how its query rows are cut, and whether programs share their splits.

A row's bits are the same every way, so the sizes of a pass may decide.
"""

from typing import NamedTuple

import torch

from specdec.kernels import next_power_of_2
from specdec.kernels.attention.query_rows import LISTED_ROWS, QueryRows
from specdec.kernels.head_columns import block_of
from specdec.kernels.prompt.attention import is_fit

MAX_SPLIT_TOKENS = 16  # query tokens per request up to which programs share a query tile's splits
# A slot with more keys is long: where query tiles fill the GPU, other programs share its splits.
# None: no slot is long, and no kernel looks for one.
ALONE_KEYS: int | None = 4096
# Batch slots that a team's program looks at: at least this many, at powers of 2. It takes more
# registers where it is compiled for 32. More where long slots are looked for.
MIN_SLOTS, MIN_TEAMED_SLOTS = 256, 64
# measured on an H200
FULL = 128  # programs, query tiles x kv heads, that fill a GPU without sharing splits
FEW = 32  # programs up to which smaller tiles make more of them
WARPS = 4  # of programs that share splits
SHARERS = 1056  # of one slot, at most: 8 on each of 132 multiprocessors
# Beside the programs of paths' last keys; where the query tiles are many, fewer, so that all fit a
# GPU at once after some hundred keys.
PATH_SHARERS = 528
MANY_TILES, FEW_SHARERS = 64, 264
# query rows of a tile, and registers of a thread, with which three programs of four warps fit a
# multiprocessor in place of two
FEWER_REGISTERS = 32, 168
# Keys that a query tile may have to walk for a window up to which its splits are not shared.
FEW_KEYS = 512
SHARING_ROWS = 32  # query rows for which tiles are made larger than slots usually need
PATH_ROWS = 64  # of a tile, at most, where rows have paths
# wide_walk.py walks the shared keys of paths with more query rows than PATH_ROWS, where it can run
# and a slot may have more keys than this. Measured on an H200.
WIDE_FROM = 3072
# up to this many rows x heads, several programs add up each; measured with 32 and 128
FEW_TO_ADD_UP = 64
COLUMNS = 32  # that each of these programs adds up, one a lane
SMALL_KEY = 256  # bytes of a key, for more stages or fewer registers
# Batch slots with more query rows are prompt/attention.py's, where that can run; measured on an
# H200: at 512 (128 tokens of 4 heads) both take as long. None: none are.
PROMPT_MORE_THAN: int | None = 512


def key_bounds(most_keys: int | None) -> list[int | None]:
    """List bounds on a slot's keys, up to this one, by which attention is cut in different ways.

    Each is also a border of splits, so passes with equally many splits are cut in the same way.
    """
    found = (n for n in (WIDE_FROM, ALONE_KEYS) if n is not None)
    return [*(n for n in found if most_keys is None or n < most_keys), most_keys]


class HeadShape(NamedTuple):
    """group: query heads of each of the G kv heads. window: keys that a row sees; None: all."""

    group: int
    G: int
    C: int
    itemsize: int  # bytes of an element of queries and keys
    window: int | None = None

    @property
    def key_bytes(self) -> int:
        return self.C * self.itemsize


class QueryTile(NamedTuple):
    """The query rows of a program, and its warps.

    more_than:    for passes whose longest batch slot has more query rows, tokens x heads of a group
    skips_masks:  tiles of keys that all rows see are not masked
    max_head_dim: only for types of 16 bits, and up to this head_dim; 0 = all
    """

    more_than: int
    rows: int
    num_warps: int
    skips_masks: bool = False
    max_head_dim: int = 0


LEAST_ROWS = 16  # of a tile: a product's least
# The only place that chooses tiles; tests compare them with others.
QUERY_TILES = (
    QueryTile(0, 16, 4),
    QueryTile(16, 32, 4),
    QueryTile(32, 64, 4, skips_masks=True, max_head_dim=128),
)


class Teams(NamedTuple):
    """Programs that share the splits of several slots: as many as fit a GPU at once."""

    max_rows: int  # of a query tile, whose keys have SMALL_KEY bytes at most; 0: of any tile
    programs: int
    num_warps: int
    num_stages: int  # 2: a tile of keys is on its way beside the one that is multiplied
    most_registers: int | None = None  # of a thread; None: as many as it takes


# For all slots of a launch; and for long ones, beside the programs that walk the others.
TEAMS = Teams(32, 396, 4, 2, 168), Teams(0, 264, 4, 2)
LONG_TEAMS = Teams(32, 264, 4, 3), Teams(0, 264, 4, 2)


def teams_for(tile: QueryTile, heads: HeadShape, is_long: bool) -> Teams:
    """Pick the row for these tiles and keys."""
    small, large = LONG_TEAMS if is_long else TEAMS
    is_small = heads.key_bytes <= SMALL_KEY and tile.rows <= small.max_rows
    return small if is_small else large


class Launch(NamedTuple):
    """How the query rows of a pass are cut."""

    tile: QueryTile
    tokens: int  # of a query tile; its rows are tokens x heads of a group, at powers of 2
    tiles: int  # of a batch slot, or of a listed tile
    is_split: bool  # programs share the splits of each query tile; else one walks them all
    sharers: int  # programs of each query tile and kv head; 1 with teams
    teams: int  # that share the splits of several slots, or of long ones: shared_splits.py
    walk_warps: int  # of each program that walks, or attends to the last keys of paths
    most_registers: int | None  # of its threads, None: as many as it takes
    looks_first: bool  # a program that shares looks for a split before all else
    is_helped: bool  # teams share the splits of long slots, and of no others
    slots: int  # that a team's program looks at, a power of 2; or 1
    has_paths: bool
    is_wide: bool  # wide_walk.py walks the shared keys
    columns: int  # of each program that adds up; 0: there are none, but for long slots

    @property
    def kind(self) -> tuple[QueryTile, bool, int, bool, int, bool, bool, int]:
        """Launches of one kind, for the same heads, take the same kernels."""
        cut = self.tile, self.is_split, self.walk_warps, self.looks_first, self.slots
        return *cut, self.has_paths, self.is_wide, self.columns


def takes_prompt_kernel(
    rows: QueryRows, group: int, S: int, C: int, dtype: torch.dtype, has_wgmma: bool
) -> bool:
    """Whether prompt/attention.py serves a pass."""
    if PROMPT_MORE_THAN is None or rows.max_query_len <= MAX_SPLIT_TOKENS:
        return False
    is_large = rows.max_query_len * group > PROMPT_MORE_THAN
    return is_large and has_wgmma and rows.paths is None and is_fit(group, S, C, dtype)


def plan_launch(
    B: int,
    max_query_len: int,
    heads: HeadShape,
    has_paths: bool = False,
    usual_query_len: int | None = None,
    most_keys: int | None = None,
) -> Launch:
    """Plan the launch of B batch slots.

    usual_query_len: as in QueryRows; tiles are made for it. most_keys: that a slot can have; None:
    any number. Slots that see a window have about as many keys each, and none is long.
    """
    usual = usual_query_len or max_query_len
    is_round = max_query_len <= MAX_SPLIT_TOKENS
    tile = query_tile(usual * heads.group, heads)
    is_split = (is_round or has_paths) and _programs(B, usual, tile, heads) < _full(has_paths)
    if heads.window is not None and keys_of_window(heads.window, max_query_len) <= FEW_KEYS:
        is_split = False
    if is_split and has_paths:
        tile = query_tile(min(usual * heads.group, PATH_ROWS), heads)
    elif is_split:
        tile = _sharing_tile(B, usual, max_query_len, heads)
    of_slot = _programs(1, usual, tile, heads)
    may_be_long = ALONE_KEYS is not None and (most_keys is None or most_keys > ALONE_KEYS)
    may_be_long = may_be_long and heads.window is None
    is_helped = may_be_long and of_slot < FULL and is_round and not has_paths and not is_split
    sharers, teams, registers = 1, 0, None
    if is_helped or (is_split and B > 1 and not has_paths):
        programs = teams_for(tile, heads, is_helped).programs
        teams = max(programs // of_slot, 1 if is_helped else B)
    elif is_split:
        if (tile.rows, heads.key_bytes) == (FEWER_REGISTERS[0], SMALL_KEY):
            registers = FEWER_REGISTERS[1]
        most = SHARERS
        if has_paths:
            most = FEW_SHARERS if B * of_slot >= MANY_TILES else PATH_SHARERS
        sharers = -(-most // (B * of_slot))
    is_wide = is_split and has_paths and usual * heads.group > PATH_ROWS
    is_wide = is_wide and heads.window is None and (most_keys is None or most_keys > WIDE_FROM)
    return Launch(
        tile,
        _tokens(tile, heads),
        tiles=-(-max_query_len // _tokens(tile, heads)),
        is_split=is_split,
        sharers=sharers,
        teams=teams,
        walk_warps=WARPS if is_split else tile.num_warps,
        most_registers=registers,
        # of plain rounds and of paths this costs more after 4,096 keys than it brings after 300
        looks_first=is_split and not teams and usual > 1 and not has_paths,
        is_helped=is_helped,
        slots=max(next_power_of_2(B), MIN_SLOTS if is_helped else MIN_TEAMED_SLOTS) if teams else 1,
        has_paths=has_paths,
        is_wide=is_wide,
        columns=_columns(B * usual, heads) if is_split or has_paths else 0,
    )


def plan_listed(heads: HeadShape) -> Launch:
    """Plan tiles that a list tells, whatever slots they are of: one program walks all keys.

    Where heads of a group are many or wide, a listed tile is cut into several.
    """
    tile = query_tile(LISTED_ROWS * heads.group, heads)
    tokens = min(_tokens(tile, heads), LISTED_ROWS)
    return Launch(
        tile=tile,
        tokens=tokens,
        tiles=LISTED_ROWS // tokens,
        is_split=False,
        sharers=1,
        teams=0,
        walk_warps=tile.num_warps,
        most_registers=None,
        looks_first=False,
        is_helped=False,
        slots=1,
        has_paths=False,
        is_wide=False,
        columns=0,
    )


def keys_of_window(window: int, tokens: int) -> int:
    """Bound the keys in the tiles of 64 that this many consecutive rows see."""
    return window + tokens + 62


def _columns(num_rows: int, heads: HeadShape) -> int:
    is_few = num_rows * heads.group * heads.G <= FEW_TO_ADD_UP
    block = int(block_of(heads.C))
    return min(COLUMNS, block) if is_few else block


def _sharing_tile(B: int, usual: int, most: int, heads: HeadShape) -> QueryTile:
    """Size tiles where programs share splits: small ones for few rows, else one for a slot."""
    small = query_tile(1, heads)
    if _programs(B, usual, small, heads) <= FEW:
        return small
    few = max(SHARING_ROWS // heads.group, 1)  # beyond, a slot has a second tile
    return query_tile(max(usual, min(2 * usual, most, few)) * heads.group, heads)


def _programs(B: int, query_len: int, tile: QueryTile, heads: HeadShape) -> int:
    return B * -(-query_len // _tokens(tile, heads)) * heads.G


def _tokens(tile: QueryTile, heads: HeadShape) -> int:
    return max(tile.rows // next_power_of_2(heads.group), 1)


def query_tile(query_rows: int, heads: HeadShape) -> QueryTile:
    """Pick the last of QUERY_TILES that is meant for this many query rows of a batch slot."""
    return [
        tile
        for tile in QUERY_TILES
        if tile.more_than < query_rows
        and (tile.max_head_dim == 0 or (heads.itemsize == 2 and tile.max_head_dim >= heads.C))
    ][-1]


def most_rows_in_parts(
    max_query_len: int, max_slots: int, heads: HeadShape, has_paths: bool = False
) -> int:
    """Bound the rows of a round whose programs share splits, by its batch slots."""
    longest = max_query_len if has_paths else min(max_query_len, MAX_SPLIT_TOKENS)
    most = 0
    for Q in range(1, longest + 1):
        of_slot = _programs(1, Q, query_tile(Q * heads.group, heads), heads)
        most = max(most, Q * min((_full(has_paths) - 1) // of_slot, max_slots))
    return most


def _full(has_paths: bool) -> int:
    """Count programs that fill a GPU; paths' number is from before these prefetched keys."""
    return 2 * FULL if has_paths else FULL
