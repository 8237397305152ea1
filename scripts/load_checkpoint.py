"""Does a checkpoint load, as what, and how long does it take?

Loads every tensor, prints each field of the config with its source, and times the load.
`specdec inspect` answers the first part without loading.

    python -m scripts.load_checkpoint TARGET [DRAFT]

    python -m scripts.load_checkpoint demo demo/eagle1
    python -m scripts.load_checkpoint ~/Llama-3.1-8B-Instruct ~/EAGLE3-LLaMA3.1-8B --dtype bfloat16
"""

import argparse
import sys
import time

import torch
from torch import Tensor

from specdec.start.locate import locate
from weights import BindingReport, CheckpointError, load_eagle, load_target


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help='directory, hub id or "demo"')
    parser.add_argument(
        "draft", nargs="?", help='directory, hub id, "demo" (EAGLE-3) or "demo/eagle1"'
    )
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="default: as the target is stored")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        start = time.perf_counter()
        target = load_target(locate(args.target, "target"), dtype=dtype, device=args.device)
        show(target.report, target.tensors, time.perf_counter() - start)
        if args.draft is not None:
            start = time.perf_counter()
            eagle = load_eagle(locate(args.draft, "draft"), target, device=args.device)
            show(eagle.report, eagle.tensors, time.perf_counter() - start)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"error: {error}")


def show(report: BindingReport, tensors: dict[str, Tensor], seconds: float) -> None:
    """The binding report, then size and time."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    print(report)
    print(
        f"  loaded: {len(tensors)} tensors, {numbers / 1e6:.1f} M numbers, {size / 1e6:.1f} MB "
        f"in {seconds:.2f} s ({size / 1e6 / seconds:.0f} MB/s)\n"
    )


if __name__ == "__main__":
    main()
