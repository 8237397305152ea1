"""`specdec widen`: a small pair at a large size, to measure what speculation costs there."""

import sys
from pathlib import Path

from specdec.start.device import device_of
from weights.bars import size_text
from weights.widen import SHAPES, widen_pair


def run_widen(out: Path, directory: Path, shape: str, dtype: str, device: str) -> None:
    """Write the pair of a directory at a shape, and say how to use it."""

    def announce(num_bytes: int) -> None:
        print(f"writes {size_text(num_bytes)} to {out}", file=sys.stderr)

    widen_pair(directory, out, SHAPES[shape], dtype, device_of(device), announce)
    print(f"{out / 'target'}\n{out / 'eagle3'}\n{out / 'prompts.json'}")
