"""The query tiles that programs may have, and which one serves a pass."""

from typing import NamedTuple


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


# The only place that chooses tiles; tests compare them with others.
QUERY_TILES = (
    QueryTile(0, 16, 4),
    QueryTile(16, 32, 4),
    QueryTile(32, 64, 4, skips_masks=True, max_head_dim=128),
)
PROMPT_TILES = tuple(
    QueryTile(1024, rows, num_warps, skips_masks)
    for rows, num_warps in ((64, 4), (64, 8), (128, 8))
    for skips_masks in (False, True)
)


class HeadShape(NamedTuple):
    """group: query heads of each of the G kv heads."""

    group: int
    G: int
    C: int
    itemsize: int  # bytes of an element of queries and keys


def query_tile(query_rows: int, heads: HeadShape) -> QueryTile:
    """Pick the last of QUERY_TILES that is meant for this many query rows of a batch slot."""
    return [tile for tile in QUERY_TILES if _is_meant(tile, query_rows, heads)][-1]


def _is_meant(tile: QueryTile, query_rows: int, heads: HeadShape) -> bool:
    fits = tile.max_head_dim == 0 or (heads.itemsize == 2 and tile.max_head_dim >= heads.C)
    return fits and tile.more_than < query_rows
