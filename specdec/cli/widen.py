"""`specdec widen`: a small pair at a large size, to measure what speculation costs there."""

from pathlib import Path

from specdec.start.device import device_of
from weights.widen import SHAPES, widen_pair


def run_widen(out: Path, directory: Path, shape: str, dtype: str, device: str) -> None:
    """Write the pair of a directory at a shape, and say how to use it."""
    widen_pair(directory, out, SHAPES[shape], dtype, device_of(device))
    print(f"{out / 'target'}\n{out / 'eagle3'}\n{out / 'prompts.json'}")
