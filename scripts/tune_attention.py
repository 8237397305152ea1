"""Which query tiles or kernel serve prompts fastest, and does each give the bits of today's?

    python -m scripts.tune_attention --json FILE                # under a minute on one GPU
    python -m scripts.tune_attention --lengths 4096 --heads 28 --kv-heads 4

One prompt in one chunk, one layer. Prints a table and a last line of JSON; exit code 1 if a tile
gives other bits. To choose one, put it into QUERY_TILES, specdec/kernels/attention/query_tiles.py;
PROMPT_MORE_THAN in launch_plan.py there says from how many rows on prompt_attention.py serves.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.bench.report import Row, table, write_json
from specdec.bench.timing import Clock
from specdec.kernels import INTERPRET, is_hopper
from specdec.kernels.attention import launch_plan, query_tiles
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.query_tiles import (
    PROMPT_TILES,
    QUERY_TILES,
    Heads,
    QueryTile,
    query_tile,
)
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.prompt_attention import is_fit
from specdec.sizes import BLOCK_SIZE

PROMPT_KERNEL = None  # as a tile: prompt_attention.py


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--device", default="cuda", help="cpu: interpreted, where bits depend on the tile"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to a file too")
    args = parser.parse_args()
    if args.device == "cpu" and not INTERPRET:
        parser.error("--device cpu needs TRITON_INTERPRET=1")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no CUDA device")
    return args


def prompt(args: argparse.Namespace, T: int) -> tuple[Tensor, Tensor, QueryRows]:
    """Queries, a cache and the rows of a prompt of T tokens."""
    num_blocks = -(-T // BLOCK_SIZE)
    how = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    shape = 2, num_blocks + 1, args.kv_heads, BLOCK_SIZE, args.head_dim
    order = torch.randperm(num_blocks, device=args.device)
    rows = QueryRows(
        block_table=order.expand(2, -1).contiguous(),
        idx_mapping=torch.zeros(1, dtype=torch.int64, device=args.device),
        positions=torch.arange(T, device=args.device),
        query_start_loc=torch.tensor([0, T], device=args.device),
        max_query_len=T,
        max_seq_len=T,
    )
    return torch.randn(T, args.heads, args.head_dim, **how), torch.randn(*shape, **how), rows


def measure(args: argparse.Namespace, T: int) -> Iterator[Row]:
    """Today's tile first, then the others, then torch's own attention of contiguous keys."""
    q, cache, rows = prompt(args, T)
    group = args.heads // args.kv_heads
    heads = Heads(group, args.kv_heads, args.head_dim, q.element_size())
    tiles = [query_tile(T * group, heads), *PROMPT_TILES]
    if is_hopper(torch.device(args.device)) and is_fit(group, BLOCK_SIZE, args.head_dim, q.dtype):
        tiles.append(PROMPT_KERNEL)
    device = torch.device(args.device)
    clock = Clock(device)
    with compiling_ahead(device) if device.type == "cuda" else nullcontext():
        for tile in tiles:
            call_with(tile, q, torch.empty_like(q), cache, rows)()
    expected = None
    for tile in tiles:
        out = torch.full_like(q, torch.nan)
        ms = clock.repeat(call_with(tile, q, out, cache, rows), args.repeats, 2).median
        expected = out if expected is None else expected
        yield row_of(T, tile, ms) | {"has_equal_bits": torch.equal(out, expected)}
    q, k, v = (q[:, :heads].transpose(0, 1)[None] for heads in (args.heads, *[args.kv_heads] * 2))
    torchs = clock.repeat(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 5, 2
    )
    yield {"prompt_tokens": T, "tile": "torch, contiguous keys", "ms_per_layer": torchs.median}


def call_with(
    tile: QueryTile | None, q: Tensor, out: Tensor, cache: Tensor, rows: QueryRows
) -> Callable[[], None]:
    """Attention in this query tile."""
    rows.launches.clear()
    more_than = 0 if tile is PROMPT_KERNEL else None
    tiles = QUERY_TILES if tile is PROMPT_KERNEL else (tile._replace(more_than=0),)

    def call() -> None:
        with (
            patch.object(query_tiles, "QUERY_TILES", tiles),
            patch.object(launch_plan, "PROMPT_MORE_THAN", more_than),
        ):
            launch_paged_attention(q, out, cache, rows)

    return call


def row_of(T: int, tile: QueryTile | None, ms: float) -> Row:
    if tile is PROMPT_KERNEL:
        return {"prompt_tokens": T, "tile": "prompt_attention.py", "ms_per_layer": ms}
    masks = "no masks inside" if tile.skips_masks else "masks"
    name = f"{tile.rows} rows, {tile.num_warps} warps, {masks}"
    return {"prompt_tokens": T, "tile": name, "ms_per_layer": ms}


def main() -> None:
    args = parse_args()
    found = [row for T in args.lengths for row in measure(args, T)]
    print(table(found))
    is_gpu = args.device != "cpu"
    device = torch.cuda.get_device_name(args.device) if is_gpu else "cpu, interpreted"
    write_json("scripts.tune_attention", {"device": device, "results": found}, args.json)
    sys.exit(int(any(row.get("has_equal_bits") is False for row in found)))


if __name__ == "__main__":
    main()
