"""Which tiles read the weights of a model fastest? Writes specdec/kernels/tuned.json for the GPU it runs on.

    python -m scripts.tune_products                                  # the Llama 8B target and its EAGLE-3 draft
    python -m scripts.tune_products --shapes split:5120x4096,whole:152064x2560

The number of splits decides the order of the sums, so one holds for every number of rows: the one with the least sum of
times, each over the best for its row count, few rows counting double. The rest is chosen for each class of row counts.
"""

import argparse
import itertools
import json
import multiprocessing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from tqdm import tqdm

from specdec.kernels import gate_up, linear
from specdec.kernels.tiles import MANY_ROWS, Tiles

LLAMA_8B = (
    "split:6144x4096,split:4096x4096,gate:28672x4096,split:4096x14336,whole:128256x4096,"
    "split:6144x8192,whole:4096x12288,whole:32000x4096"
)
SHARED_MEMORY = 227 * 1024
L2 = 64 << 20


@dataclass(frozen=True)
class Product:
    kind: str  # split: sums for a reader; whole: finished; gate: SwiGLU
    N: int
    K: int


def candidates(product: Product, rows: int, splits: int) -> list[Tiles]:
    """Every cut into this many splits that fits into shared memory."""
    is_serial, halves = rows == MANY_ROWS, 2 if product.kind == "gate" else 1
    found = []
    for block_n, block_m, block_k, stages, warps in itertools.product(
        (64, 128), (rows,) if rows <= 64 else (64, 128, 256), (64, 128, 256), (3, 4, 5, 6), (4, 8)
    ):
        size = (block_n * halves + block_m) * block_k * 2 * stages
        accumulators = block_n * block_m * halves * (2 if is_serial and splits > 1 else 1) // (32 * warps)
        if block_m > rows or size > SHARED_MEMORY or accumulators > 160 or (warps == 8 and block_n * block_m < 8192):
            continue
        if size < 48 * 1024 or (rows > 64 and stages > 4):
            continue
        found.append(Tiles(block_n, block_m, block_k, splits, stages, warps, is_serial))
    return found


def launch(product: Product, x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> None:
    module = gate_up if product.kind == "gate" else linear
    module.choose_tiles = lambda *_, **__: tiles
    if product.kind == "gate":
        gate_up.launch_gate_up(x, weight, None)
    elif product.kind == "split":
        linear.launch_split_linear(x, weight, None)
    else:
        linear.launch_linear(x, weight, None, torch.float32)


def tensors(product: Product, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows, and enough copies of the weight that none is in the L2 cache when its turn comes."""
    copies = max(2, -(-3 * L2 // (product.N * product.K * 2)))
    x = torch.randn(rows, product.K, device="cuda").bfloat16()
    return x, [torch.randn(product.N, product.K, device="cuda").bfloat16() for _ in range(copies)]


def compile_all(jobs: list[tuple[Product, int, Tiles]]) -> None:
    """Run each once, so that its binary lies in Triton's cache; what does not compile is met again when it is timed."""
    for product, rows, tiles in jobs:
        x, weight = torch.zeros(rows, product.K, device="cuda").bfloat16(), torch.zeros(0, device="cuda")
        weight = torch.empty(product.N, product.K, device="cuda", dtype=torch.bfloat16)
        try:
            launch(product, x, weight, tiles)
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            continue


def microseconds(product: Product, x: torch.Tensor, weights: list[torch.Tensor], tiles: Tiles) -> float:
    """Median time of one product in a graph of one launch per copy; infinite if it does not compile."""
    try:
        launch(product, x, weights[0], tiles)
    except (RuntimeError, triton.runtime.errors.OutOfResources):
        return float("inf")
    rounds = max(1, 16 // len(weights))  # a graph long enough that its own launch does not count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * rounds:
            launch(product, x, weight, tiles)
    total = triton.testing.do_bench(graph.replay, warmup=3, rep=12, return_mode="median")
    return float(total) * 1e3 / len(weights) / rounds


def tune(product: Product, classes: dict[int, int]) -> dict[str, object]:
    """The table's entry for one weight."""
    best: dict[int, dict[int, tuple[float, Tiles]]] = {}  # by row class, by splits
    for row_class, rows in classes.items():
        x, weights = tensors(product, rows)
        best[row_class] = {}
        for splits in split_counts(product):
            timed = [(microseconds(product, x, weights, t), t) for t in candidates(product, row_class, splits)]
            best[row_class][splits] = min(timed, key=lambda pair: pair[0])

    def cost(splits: int) -> float:
        return sum(
            (2 if c == 16 else 1) * found[splits][0] / min(us for us, _ in found.values()) for c, found in best.items()
        )

    splits = min(split_counts(product), key=cost)
    rows_table = {}
    for row_class, rows in classes.items():
        us, tiles = best[row_class][splits]
        rate = product.N * product.K * 2 / us / 1e3
        print(f"{product.kind} {product.N}x{product.K} rows {rows}: {us:.1f} us, {rate:.0f} GB/s, {tiles}", flush=True)
        names = ("block_n", "block_m", "block_k", "num_stages", "num_warps")
        rows_table[str(row_class)] = {name: asdict(tiles)[name] for name in names}
    return {"splits": splits, "rows": rows_table}


def split_counts(product: Product) -> tuple[int, ...]:
    """Numbers of splits to try."""
    return (1, 2, 4) if product.kind == "split" else (1,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=LLAMA_8B, help="KIND:NxK, ...; KIND is split, whole or gate")
    parser.add_argument("--out", type=Path, default=Path("specdec/kernels/tuned.json"))
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()
    products = [
        Product(kind, *map(int, shape.split("x"))) for kind, shape in (s.split(":") for s in args.shapes.split(","))
    ]
    classes = {16: 8, 32: 32, 64: 64, 128: 128, 256: 192, 512: 384, MANY_ROWS: 2048}
    unique = {
        (p.kind, c, t): (p, classes[c], t)
        for p in products
        for c in classes
        for splits in split_counts(p)
        for t in candidates(p, c, splits)
    }
    jobs = list(unique.values())
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        parts = [jobs[i :: 4 * args.workers] for i in range(4 * args.workers)]
        list(tqdm(pool.imap_unordered(compile_all, parts), total=len(parts), desc=f"compiling {len(jobs)}"))
    table = json.loads(args.out.read_text()) if args.out.exists() else {}
    entries = table.setdefault(torch.cuda.get_device_name(), {})
    for product in products:
        entries[f"{product.kind},{product.N},{product.K},bfloat16"] = tune(product, classes)
    args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
