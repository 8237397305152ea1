"""How fast is a layer of experts, and which tiles are fastest? Prints each row once it is measured.

    python -m scripts.bench_experts                       # published sizes, as specdec bench
    python -m scripts.bench_experts --models qwen --rows 1,8,64
    python -m scripts.bench_experts --search --rows 1,8,64,256,2048 --json FILE

--search times every candidate of kernels/experts/tiles.py in both products, the second beside the
best of the first, from ids that are given: no router, and no norm.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from specdec.bench.experts import PUBLISHED, ROWS, TINY, Sizes, draw_layers, layer_rows
from specdec.bench.report import Row
from specdec.bench.timing import measure_bandwidth, per_call_ms
from specdec.kernels import triton
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import FEW_ROWS, ExpertTiles, candidates, expert_tiles
from specdec.kernels.experts.tiles import ROWS as ROWS_OF_TILES
from specdec.kernels.tile_shapes import row_class


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="parts of their names with commas; default: all")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--search", action="store_true", help="time all candidates, on a GPU")
    parser.add_argument("--json", type=Path, help="write all rows to a file, after each one")
    return parser.parse_args()


def ways(T: int, sizes: Sizes) -> Iterator[tuple[int, bool]]:
    """Give rows of a tile, and whether pairs are sorted."""
    if T <= FEW_ROWS:
        yield row_class(T), False
    mean = T * sizes.k / sizes.E
    for block_m in ROWS_OF_TILES:
        if mean / 4 <= block_m <= 4 * max(mean, 8):
            yield block_m, True


def search(sizes: Sizes, T: int, device: torch.device) -> Iterator[Row]:
    layers = draw_layers(sizes, device)
    x = torch.randn(T, sizes.D, device=device).to(layers[0].down.dtype)
    all_ids = [torch.rand(T, sizes.E, device=device).topk(sizes.k).indices.int() for _ in range(4)]
    turns = [(layer, ids) for layer in layers for ids in all_ids]

    def launch(tiles: ExpertTiles | None) -> None:
        launch_expert_parts(x, all_ids[0], layers[0].gate_up, layers[0].down, tiles)

    def time(tiles: ExpertTiles | None) -> float:
        """Time both products in microseconds; infinite if these tiles do not run."""
        calls = [
            partial(launch_expert_parts, x, ids, layer.gate_up, layer.down, tiles)
            for layer, ids in turns
        ]
        try:
            return 1e3 * per_call_ms(device, calls)
        except torch.AcceleratorError:  # after it no call on this GPU succeeds
            raise
        except (RuntimeError, triton.errors.TritonError):
            return math.inf

    weights = layers[0].gate_up.shape, layers[0].down.shape
    rule = expert_tiles(T, sizes.k, *weights, x.dtype)
    yield {"model": sizes.model, "rows": T, "us": time(None), "tiles": rule, "is_rule": True}
    for block_m, is_sorted in ways(T, sizes):
        first, second = (
            candidates("gate_up", block_m, sizes.D),
            candidates("down", block_m, sizes.I),
        )
        made = [ExpertTiles(gate, second[0], is_sorted) for gate in first]
        made += [ExpertTiles(first[0], down, is_sorted) for down in second[1:]]
        with compiling_ahead(device, progress=False, may_fail=True):
            for tiles in made:
                launch(tiles)
        best = min(first, key=lambda gate: time(ExpertTiles(gate, second[0], is_sorted)))
        for down in second:
            tiles = ExpertTiles(best, down, is_sorted)
            yield {"model": sizes.model, "rows": T, "us": time(tiles), "tiles": tiles}


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = PUBLISHED if device.type == "cuda" else TINY
    parts = args.models.lower().split(",") if args.models else [""]
    models = [each for each in known if any(part in each.model.lower() for part in parts)]
    rows = [int(T) for T in args.rows.split(",")]
    if args.search and device.type != "cuda":
        raise SystemExit("--search needs a GPU: tiles change no time elsewhere")
    if args.search:
        found = [search(sizes, T, device) for sizes in models for T in rows]
    else:
        bandwidth = measure_bandwidth(device)
        print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
        found = [layer_rows(sizes, rows, device, bandwidth) for sizes in models]
    seen = []
    for row in itertools.chain.from_iterable(found):
        seen.append(row)
        print(json.dumps(row), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
