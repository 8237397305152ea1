"""Run `specdec bench` on random weights of a published model's sizes, with an EAGLE-3 head.

    python -m scripts.bench_random qwen3-30b-a3b --suite rounds -k 3 --batch 1,8,64 --json FILE
    python -m scripts.bench_random qwen3-30b-a3b --accept demo-experts --suite loop --adaptive

For the time that steps take where no checkpoint is at hand: weights are drawn on the device, rows
choose different experts, and drafts hold by luck alone. All options of `specdec bench` may follow.

--accept makes drafts hold as often as those of a pair that was measured, or at given rates by
level, of which the last one is for all further levels too: 0.8,0.7. What is drafted then decides on
the text, so outputs are not compared: the suite loop alone is run so, and its rows say it.
"""

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from scripts.forced_acceptance.patches import forced, rates_of
from scripts.random_models import MODELS
from scripts.random_pair import draft_vocabulary, draw, write_pair
from specdec.cli import main as specdec


def main(model: str = "--help", *rest: str) -> None:
    if model not in MODELS:
        raise SystemExit(f"{model}: give one of {', '.join(MODELS)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accept")
    given, others = parser.parse_known_args(rest)
    acceptance = nullcontext()
    if given.accept is not None:
        parser.add_argument("--suite")
        if parser.parse_known_args(rest)[0].suite != "loop":
            raise SystemExit("--accept: outputs are not compared, give --suite loop")
        acceptance = forced(rates_of(given.accept), draft_vocabulary(model))
    with tempfile.TemporaryDirectory() as out, mock.patch("weights.load.read_tensors", draw):
        write_pair(Path(out), model)
        with acceptance:
            specdec(["bench", f"{out}/target", "--draft", f"{out}/eagle3", *others])


if __name__ == "__main__":
    main(*sys.argv[1:])
