"""`specdec widen`: a small pair at a large size, to measure what speculation costs there."""

import sys
from pathlib import Path

from specdec.cli.options import check_choice
from specdec.start.device import device_of
from weights.bars import size_text
from weights.demo import demo_directory
from weights.widen import SHAPES, widen_pair

DTYPES = ("bfloat16", "float32")


def run_widen(out: Path, source: str, shape: str, dtype: str, device: str) -> None:
    """Write the pair, and say how to use it."""
    check_choice("--shape", shape, tuple(SHAPES))
    check_choice("--dtype", dtype, DTYPES)
    directory = demo_directory("target").parent if source == "demo" else Path(source)
    for part in ("target", "eagle3"):
        if not (directory / part / "config.json").is_file():
            raise ValueError(
                f"--source {source}: no {part}/config.json in it; give demo, or a directory with "
                "target/, eagle3/ and prompts.json"
            )

    def announce(num_bytes: int) -> None:
        print(f"writes {size_text(num_bytes)} to {out}", file=sys.stderr)

    widen_pair(directory, out, SHAPES[shape], dtype, device_of(device), announce)
    print(f"{out / 'target'}\n{out / 'eagle3'}\n{out / 'prompts.json'}")
