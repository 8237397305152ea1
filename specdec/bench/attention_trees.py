"""What attention over a draft tree costs, by the size of its query tiles.

A tile of 64 rows holds 16 nodes of a model with 4 query heads for each kv head, so 32 nodes read
the shared keys in two programs. Larger tiles read them fewer times, more warps share the work of
one; whether they keep every bit is in the row too.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from specdec.bench.attention_jobs import Job, LayerShape, caches_of, query_rows
from specdec.bench.timing import per_call_ms
from specdec.kernels import next_power_of_2
from specdec.kernels.attention import launch_plan, query_tiles
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import Paths, QueryRows
from specdec.kernels.attention.query_tiles import QUERY_TILES, QueryTile
from specdec.sizes import BLOCK_SIZE

CHILDREN = 4  # of each node
LARGER_TILES = (QueryTile(32, 64, 8), QueryTile(64, 128, 8))


@torch.inference_mode()
def timed_trees(layer: LayerShape, job: Job, model_len: int) -> Iterator[tuple[str, float, bool]]:
    """The name of a query tile, milliseconds a layer, and whether its bits are the first one's.

    job: a tree of `rows` nodes after `context` keys, each node with CHILDREN children
    """
    num_blocks = -(-job.context // BLOCK_SIZE) + -(-job.rows // BLOCK_SIZE)
    caches = caches_of(layer, num_blocks, layer.num_copies(job))
    q_THC = layer.random(job.rows, layer.H)
    tree = _rows_of_tree(layer, job, model_len)
    expected = None
    for tile in (None, *larger_tiles(layer, job)):
        tiles = QUERY_TILES if tile is None else (*QUERY_TILES, tile)
        most = launch_plan.PATH_ROWS if tile is None else tile.rows
        warps = launch_plan.WARPS if tile is None else tile.num_warps
        out_THC = torch.empty_like(q_THC)
        rows = replace(tree)  # without the launches of the tile before
        with (
            patch.object(query_tiles, "QUERY_TILES", tiles),
            patch.object(launch_plan, "PATH_ROWS", most),
            patch.object(launch_plan, "WARPS", warps),
        ):
            calls = [partial(paged_attention, q_THC, out_THC, cache, rows) for cache in caches]
            ms = per_call_ms(layer.device, calls)
        expected = out_THC if expected is None else expected
        name = "as shipped" if tile is None else f"{tile.rows} rows, {tile.num_warps} warps"
        yield name, ms, torch.equal(out_THC, expected)


def larger_tiles(layer: LayerShape, job: Job) -> list[QueryTile]:
    """Those that the tree fills at least halfway; on a CPU there are no tiles to choose."""
    num_rows = job.rows * next_power_of_2(layer.H // layer.G)
    is_gpu = layer.device.type == "cuda"
    return [tile for tile in LARGER_TILES if is_gpu and tile.more_than < num_rows]


def _rows_of_tree(layer: LayerShape, job: Job, model_len: int) -> QueryRows:
    """The nodes lie in random slots of the blocks after those of the context."""
    N, L = job.rows, job.context
    num_blocks = -(-L // BLOCK_SIZE)
    blocks = torch.arange(num_blocks, device=layer.device)[None]
    slots = num_blocks * BLOCK_SIZE + torch.randperm(N)
    paths = [_path(node) for node in range(N)]
    D1 = max(map(len, paths))
    named = torch.full((N, D1), -1)
    for node, path in enumerate(paths):
        named[node, : len(path)] = slots[path]
    positions = torch.tensor([L + len(path) - 1 for path in paths], device=layer.device)
    starts = torch.tensor([L], device=layer.device)
    end = Job(batch=1, rows=N, context=L + D1)
    found = Paths(slots=named.to(layer.device), starts=starts)
    return query_rows(layer, end, blocks, model_len, positions, found)


def _path(node: int) -> list[int]:
    """From the root to the node."""
    return [*(_path((node - 1) // CHILDREN) if node else ()), node]
