"""Run `specdec bench` on random weights of a published model's sizes, with an EAGLE-3 head.

    python -m scripts.bench_random qwen3-30b-a3b --suite rounds -k 3 --batch 1,8,64 --json FILE

For the time that steps take where no checkpoint is at hand: weights are drawn on the device, rows
choose different experts, and drafts hold by luck alone. All options of `specdec bench` may follow.
"""

import sys
import tempfile
from pathlib import Path
from unittest import mock

from scripts.random_pair import MODELS, draw, write_pair
from specdec.cli import main as specdec


def main(model: str = "--help", *rest: str) -> None:
    if model not in MODELS:
        raise SystemExit(f"{model}: give one of {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as out, mock.patch("weights.load.read_tensors", draw):
        write_pair(Path(out), model)
        specdec(["bench", f"{out}/target", "--draft", f"{out}/eagle3", *rest])


if __name__ == "__main__":
    main(*sys.argv[1:])
