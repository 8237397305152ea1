"""Which tiles read the weights of a model fastest? Writes specdec/kernels/tuned.json for this GPU.

    python -m scripts.tune_products                          # Llama 8B and its EAGLE-3 draft
    python -m scripts.tune_products --shapes split:5120x4096,whole:152064x2560
    python -m scripts.tune_products --classes 192,256,384    # only these; splits from the table

The number of splits decides the order of the sums, so every number of rows takes the same one: the
one with the least sum of times, each over the best for its row count, few rows counting double. The
rest is chosen for each class of row counts. A class is measured at its largest number of rows (16
at 8, the last one at 2,048), beside cuBLAS.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from tqdm import tqdm

from specdec.kernels import best_token, gate_up, linear
from specdec.kernels.tiles import MANY_ROWS, ROW_CLASSES, Tiles

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

    @property
    def is_head(self) -> bool:
        """A vocabulary: best_token.py reads it, with the tiles of a finished product."""
        return self.kind == "whole" and self.N > 4 * self.K


def candidates(product: Product, rows: int, splits: int) -> list[Tiles]:
    """Every cut into this many splits that fits into shared memory and registers."""
    is_few = rows <= 64
    is_serial = rows == MANY_ROWS
    halves = 2 if product.kind == "gate" else 1
    sums = halves * (2 if is_serial and splits > 1 else 1)
    powers = (64, 128, 256)
    many = powers if is_serial or product.is_head else (64, 96, 128, 192, 256)
    block_ns = (64, 128) if is_few else powers
    block_ms = (rows,) if is_few else many
    block_ks = powers if is_few else (64, 128)
    found = []
    for n, m, k, stages, warps in itertools.product(
        block_ns, block_ms, block_ks, (3, 4, 5, 6), (4, 8)
    ):
        size = (n * halves + m) * k * 2 * stages
        is_thin = warps == 8 and n * m < 8192
        fits = 48 * 1024 <= size <= SHARED_MEMORY and n * m * sums // (32 * warps) <= 160
        if m <= rows and fits and not is_thin:
            found.append(Tiles(n, m, k, splits, stages, warps, is_serial))
    return found


def launch(product: Product, x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> None:
    module = gate_up if product.kind == "gate" else best_token if product.is_head else linear
    module.tiles_for = lambda *_, **__: tiles
    if product.kind == "gate":
        gate_up.launch_gate_up(x, weight, None)
    elif product.is_head:
        best_token.launch_tile_maxima(x, weight)
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
    """Run each once, to fill Triton's cache; `microseconds` reports what does not compile."""
    for product, rows, tiles in jobs:
        x = torch.zeros(rows, product.K, device="cuda").bfloat16()
        weight = torch.empty(product.N, product.K, device="cuda", dtype=torch.bfloat16)
        try:
            launch(product, x, weight, tiles)
        except (RuntimeError, triton.runtime.errors.OutOfResources):
            continue


def microseconds(
    product: Product, x: torch.Tensor, weights: list[torch.Tensor], tiles: Tiles
) -> float:
    """Of one product; infinite if it does not compile."""
    try:
        launch(product, x, weights[0], tiles)
    except (RuntimeError, triton.runtime.errors.OutOfResources):
        return float("inf")
    return time_graph(lambda weight: launch(product, x, weight, tiles), weights)


def time_graph(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Median microseconds of a call, in a graph long enough that its own launch does not count."""
    rounds = max(1, 16 // len(weights))
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * rounds:
            call(weight)
    total = triton.testing.do_bench(graph.replay, warmup=3, rep=12, return_mode="median")
    return float(total) * 1e3 / len(weights) / rounds


def tune(product: Product, classes: dict[int, int], splits: int | None) -> dict[str, object]:
    """The table's entry for one weight. splits: None chooses."""
    counts = split_counts(product) if splits is None else (splits,)
    best: dict[int, dict[int, tuple[float, Tiles]]] = {}  # by row class, by splits
    cublas = {}
    for row_class, rows in classes.items():
        x, weights = tensors(product, rows)
        cublas[row_class] = time_graph(lambda weight: torch.mm(x, weight.t()), weights)  # noqa: B023
        best[row_class] = {}
        for count in counts:
            tiles = candidates(product, row_class, count)
            timed = [(microseconds(product, x, weights, each), each) for each in tiles]
            best[row_class][count] = min(timed, key=lambda pair: pair[0])

    def cost(count: int) -> float:
        return sum(
            (2 if c == 16 else 1) * found[count][0] / min(us for us, _ in found.values())
            for c, found in best.items()
        )

    chosen = min(counts, key=cost)
    rows_table = {}
    for row_class, rows in classes.items():
        us, tiles = best[row_class][chosen]
        rate = product.N * product.K * 2 / us / 1e3
        times = f"{us:.1f} us (cuBLAS {cublas[row_class]:.1f}), {rate:.0f} GB/s"
        print(f"{product.kind} {product.N}x{product.K} rows {rows}: {times}, {tiles}", flush=True)
        names = ("block_n", "block_m", "block_k", "num_stages", "num_warps")
        rows_table[str(row_class)] = {name: asdict(tiles)[name] for name in names}
    return {"splits": chosen, "rows": rows_table}


def split_counts(product: Product) -> tuple[int, ...]:
    """Numbers of splits to try."""
    return (1, 2, 4) if product.kind == "split" else (1,)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = "KIND:NxK, ...; KIND is split, whole or gate"
    classes = "row classes to measure again; default: all, and the splits too"
    parser.add_argument("--shapes", default=LLAMA_8B, help=kinds)
    parser.add_argument("--classes", default="", help=classes)
    parser.add_argument("--out", type=Path, default=Path("specdec/kernels/tuned.json"))
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    products = [
        Product(kind, *map(int, shape.split("x")))
        for kind, shape in (s.split(":") for s in args.shapes.split(","))
    ]
    classes = {
        c: {16: 8, MANY_ROWS: 2048}.get(c, c)
        for c in map(int, args.classes.split(",") if args.classes else ROW_CLASSES)
    }
    table = json.loads(args.out.read_text()) if args.out.exists() else {}
    entries = table.setdefault(torch.cuda.get_device_name(), {})
    keys = {product: f"{product.kind},{product.N},{product.K},bfloat16" for product in products}
    fixed = {p: entries[key]["splits"] if args.classes else None for p, key in keys.items()}
    compile_in_parallel(products, classes, fixed, args.workers)
    for product, key in keys.items():
        found = tune(product, classes, fixed[product])
        rows = {**(entries[key]["rows"] if args.classes else {}), **found["rows"]}
        entries[key] = found | {"rows": dict(sorted(rows.items(), key=lambda item: int(item[0])))}
        args.out.write_text(json.dumps(table, indent=1) + "\n")


def compile_in_parallel(
    products: list[Product], classes: dict[int, int], fixed: dict[Product, int | None], workers: int
) -> None:
    """Fill Triton's cache: a binary serves all products of a kind."""
    unique = {
        (p.kind, p.is_head, t): (p, classes[c], t)
        for p in products
        for c in classes
        for count in ([fixed[p]] if fixed[p] else split_counts(p))
        for t in candidates(p, c, count)
    }
    jobs = list(unique.values())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = [jobs[i :: 4 * workers] for i in range(4 * workers)]
        done = pool.imap_unordered(compile_all, parts)
        list(tqdm(done, total=len(parts), desc=f"compiling {len(jobs)}"))


if __name__ == "__main__":
    main()
