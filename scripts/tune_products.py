"""Which tiles read the weights of models fastest? Writes specdec/kernels/tuned.json for this GPU.

    python -m scripts.tune_products --max-seconds 480            # every known model
    python -m scripts.tune_products --models llama-3.2-1b,qwen3-8b --again
    python -m scripts.tune_products --shapes split:5120x4096,whole:152064x2560
    python -m scripts.tune_products --shapes split:5120x2048 --dtype float8_e4m3fn --block
    python -m scripts.tune_products --random 5 --json FILE       # the rule beside tuned, no table

The search and what it costs: specdec/tune/. Without --again only what the table lacks is measured.
Every number of rows takes the same parts, which are chosen here alone (scripts/part_choice.py).
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from scripts.part_choice import best_order, orders_to_try
from scripts.tuned_models import KNOWN_MODELS, known_products, random_products
from specdec.kernels.sum_order import Order
from specdec.kernels.tables import NONE, key_of, parse_table, read_table
from specdec.kernels.tile_shapes import ROW_CLASSES, Product
from specdec.kernels.tiles import gpu_name
from specdec.tune.gpu_clock import GpuClock
from specdec.tune.search import HEAD, Measured, Tuning, finite, jobs_of


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = f"names with commas, default: all ({', '.join(KNOWN_MODELS)}); with -fp8: in FP8"
    parser.add_argument("--models", help=models)
    parser.add_argument("--shapes", help="KIND:NxK, ...; KIND is split, whole or gate")
    parser.add_argument("--dtype", default="bfloat16", help="of --shapes; float8_e4m3fn: FP8")
    parser.add_argument("--block", action="store_true", help="FP8 in blocks, not by channel")
    parser.add_argument("--random", type=int, help="this many random products, no table")
    parser.add_argument("--seed", type=int, default=0, help="of the random products")
    parser.add_argument("--again", action="store_true", help="what the table has too")
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, help="write every time to a file")
    parser.add_argument("--out", type=Path, default=Path("specdec/kernels/tuned.json"))
    return parser.parse_args()


def products_of(args: argparse.Namespace) -> list[Product]:
    if args.random:
        return random_products(args.random, args.seed)
    if args.shapes:
        keys = [shape.replace(":", ",").replace("x", ",") for shape in args.shapes.split(",")]
        text = json.dumps({"": {f"{key},{args.dtype}": {"rows": {}} for key in keys}})
        return list(parse_table(text, "--shapes", "give KIND:NxK")[""])
    names = args.models.split(",") if args.models else list(KNOWN_MODELS)
    return list(dict.fromkeys(p for name in names for p in known_products(name)))


def rule_over_tuned(found: Sequence[Measured]) -> dict[str, float | None]:
    """Compare the rule with tuning: geometric means by row class and overall, and the worst.

    None where the rule's tiles did not run.
    """

    def mean(ratios: Sequence[float]) -> float | None:
        return finite(math.exp(sum(map(math.log, ratios)) / len(ratios)))

    by_class = {
        rows: [m.rows[rows].rule_us / m.rows[rows].us for m in found if rows in m.rows]
        for rows in ROW_CLASSES
    }
    every = [ratio for ratios in by_class.values() for ratio in ratios]
    means = {str(rows): mean(ratios) for rows, ratios in by_class.items() if ratios}
    return means | {"overall": mean(every), "worst": finite(max(every))}


def main() -> None:
    args = parse_args()
    products = products_of(args)
    device = torch.device("cuda")
    clock, gpu = GpuClock(device, args.block), gpu_name(device)
    is_known = not (args.random or args.again)
    known = read_table(args.out).get(gpu, {}) if is_known else {}

    @cache
    def order_of(product: Product) -> Order:
        return best_order(product, clock, known.get(product))

    file = None if args.random else args.out
    tuning = Tuning(clock=clock, gpu=gpu, file=file, order_of=order_of, again=args.again)
    wanted = [p for p in products if set(known.get(p, NONE).rows) != set(ROW_CLASSES)]
    print(f"{tuning.gpu}: {len(wanted)} of {len(products)} products\n{HEAD}")
    start = time.monotonic()
    clock.prepare(
        job
        for product in wanted
        for order in orders_to_try(product)
        for job in jobs_of(product, order, ROW_CLASSES, clock.has_wgmma)
    )
    found: list[Measured] = []
    while len(found) < len(wanted) and time.monotonic() - start < args.max_seconds:
        found += tuning.run([wanted[len(found)]])
        print(found[-1].table(), flush=True)
    if found:
        summary = {"gpu": tuning.gpu, "rule_over_tuned": rule_over_tuned(found)}
        if args.json:
            rows = [measured.as_json() for measured in found]
            args.json.write_text(json.dumps(summary | {"products": rows}) + "\n")
        print(json.dumps(summary))
    left = [key_of(product) for product in wanted[len(found) :]]
    if left:
        print(f"no time for {len(left)}: {' '.join(left)}")


if __name__ == "__main__":
    main()
