"""Which batches of each family of graphs are captured: numbers of requests, and rows."""

import itertools
from collections.abc import Sequence

from specdec.kernels.tile_shapes import ROW_CLASSES
from specdec.sizes import EngineSizes

# Request counts of plain rounds: up to 64 rows take no longer than reading the weights, so a few
# sizes are enough; beyond, rows up to each multiple of 32 share tiles.
PLAIN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
FEW_DRAFTS = 3  # a round of few requests has a graph for these, beside one for all
PADDED_ROWS = (32, 128)  # between these, padding to the next tiles takes up to 2 % of a round


def request_sizes(max_reqs: int, query_len: int) -> list[int]:
    """Capture 1 to 8, then every 8th, and the largest batch of each tile size.

    Padding inside a tile is free, and one row more would compute half as many again. From 64 on
    every 32nd is enough where a request has one row.
    """
    most = (rows // query_len for rows in ROW_CLASSES)
    eighths = [n for n in range(8, max_reqs, 8) if query_len > 1 or n <= 64 or n % 32 == 0]
    sizes = {*range(1, 9), *eighths, *most, max_reqs}
    return sorted(n for n in sizes if 0 < n <= max_reqs)


def tree_sizes(sizes: EngineSizes, requests: Sequence[int] | None) -> tuple[int, ...]:
    """List the requests of rounds of trees, where other rounds are of chains.

    requests: None: powers of two
    """
    if not sizes.has_both or sizes.tree is None:
        return ()
    most = sizes.max_tree_requests
    if requests is None:
        requests = [1 << i for i in range(most.bit_length())]
    # padding takes the shape of the requests beside it
    ends = (first - 1 for first in sizes.tree.first_requests)
    return tuple(sorted({*(n for n in (*requests, *ends) if 0 < n < most), most}))


def shared_shapes(
    sizes: EngineSizes, requests: Sequence[int] | None = None, num_dear: int = 0
) -> tuple[tuple[int, int], ...]:
    """List (requests, rows) of rounds whose rows are shared out, by rows.

    Few are enough: slots without a row cost next to nothing, and neither does padding up to the
    most rows that share tiles.

    requests: None: powers of two; the most requests are always among them
    num_dear: up to here each row costs, so the planner may choose every number of levels
    """
    most = sizes.max_num_seqs
    Q = sizes.query_len
    if not sizes.is_adaptive:
        return ()
    if requests is None:
        requests = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    found = set()
    counts = {*requests, *tree_sizes(sizes, requests), most}
    for fewer, B in itertools.pairwise([0, *sorted(counts)]):
        all_rows = min(B * Q, sizes.max_verify_rows)
        few = min(B * (FEW_DRAFTS + 1), all_rows)
        rows = {B, few, all_rows, *(c for c in ROW_CLASSES if fewer < c < all_rows)}
        every_level = [B * n for n in range(2, Q)]  # all drafts of n - 1 levels fit
        rows |= {n for n in every_level if PADDED_ROWS[0] < n < min(PADDED_ROWS[1], all_rows)}
        rows |= {n for n in every_level if n < min(num_dear, all_rows)}
        found |= {(B, n) for n in rows}
    return tuple(sorted(found, key=lambda shape: (shape[1], shape[0])))


def plain_sizes(max_reqs: int) -> list[int]:
    """List the requests of rounds of one row each."""
    return [*(n for n in PLAIN_SIZES if n < max_reqs), *range(96, max_reqs, 32), max_reqs]
