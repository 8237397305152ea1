"""How long does attention take in a layer with a window, and with which kernels?

    python -m scripts.bench_windows                       # gpt-oss's heads, 32,768 tokens, a GPU
    python -m scripts.bench_windows --window 1024 --rows 1,4 --few-keys 0,512

Layers take turns, so that no cache still holds keys when they are read again. --few-keys: keys that
a query tile may walk for a window before programs share its splits (FEW_KEYS of launch_plan.py).
"""

import argparse
import itertools
import json
from functools import partial
from unittest import mock

import torch

from specdec.bench.timing import per_call_ms
from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import QueryRows
from specdec.sizes import BLOCK_SIZE

LAYERS = 24


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("heads", 64), ("kv-heads", 8), ("head-dim", 64), ("window", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--context", type=int, default=32768)
    for name, values in (("batch", "1,64"), ("rows", "1,4")):
        parser.add_argument(f"--{name}", type=numbers, default=values, help="with commas")
    parser.add_argument("--few-keys", type=numbers, default=str(launch_plan.FEW_KEYS))
    return parser.parse_args()


def requests(args: argparse.Namespace, B: int, rows: int) -> QueryRows:
    """Ask by the last rows of B requests; the blocks of a request's table are few, in turn."""
    own = args.window // BLOCK_SIZE + 2
    blocks = torch.arange(args.context // BLOCK_SIZE) % own
    table = torch.arange(B + 1)[:, None] * own + blocks
    positions = torch.arange(args.context - rows, args.context).repeat(B)
    size = workspace_size(B * rows, args.heads, args.head_dim, args.context)
    return QueryRows(
        block_table=table.cuda(),
        idx_mapping=torch.arange(B).cuda(),
        positions=positions.cuda(),
        max_query_len=rows,
        max_seq_len=args.context,
        workspace=torch.empty(size, device="cuda"),
    )


def measure(args: argparse.Namespace, B: int, rows: int) -> float:
    """Time a layer's attention in microseconds."""
    asked = requests(args, B, rows)
    num_blocks = (B + 1) * (args.window // BLOCK_SIZE + 2)
    how = {"dtype": torch.bfloat16, "device": "cuda"}
    shape = 2, num_blocks + 1, args.kv_heads, BLOCK_SIZE, args.head_dim
    caches = [torch.randn(shape, **how) for _ in range(LAYERS)]
    q = torch.randn(B * rows, args.heads, args.head_dim, **how)
    sinks = torch.randn(args.heads, device="cuda")
    options = {"window": args.window, "sinks_H": sinks}
    calls = [partial(paged_attention, q, q.clone(), c, asked, **options) for c in caches]
    return 1e3 * per_call_ms(q.device, calls)


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    for few, B, rows in itertools.product(args.few_keys, args.batch, args.rows):
        with mock.patch.object(launch_plan, "FEW_KEYS", few):
            row = {
                "few_keys": few,
                "batch": B,
                "rows": rows,
                "us": round(measure(args, B, rows), 2),
            }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
