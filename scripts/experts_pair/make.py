"""Make the pair with experts: corpus, target and head, within a number of seconds.

    python -m scripts.experts_pair.make OUT                      # on a GPU: 210 seconds
    python -m scripts.experts_pair.make OUT --device cpu --corpus-seconds 5 --seconds 60
    python -m scripts.experts_pair.make OUT --target OUT/target  # another head for this target

Writes OUT/target as soon as it is trained, then OUT/eagle3. A corpus that takes longer than it may
is cut short.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from scripts.experts_pair.corpus import make_corpus
from scripts.experts_pair.publish import load_target, save_head, save_target
from scripts.experts_pair.rows import Rows
from scripts.experts_pair.train_head import train_head
from scripts.experts_pair.train_target import BATCH, train_target

TARGET = 0.6  # of the time after the corpus
SAVING = 5.0  # seconds, for what is written and measured after training


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=210.0, help="for all, imports left out")
    parser.add_argument("--corpus-seconds", type=float, default=22.0, help="at most")
    parser.add_argument("--corpus", type=Path, help="what scripts.experts_pair.corpus wrote")
    parser.add_argument("--target", type=Path, help="a target that is there already")
    parser.add_argument("--device", default="cuda", choices=tuple(BATCH))
    return parser.parse_args()


def main() -> None:
    given, start = parse_args(), time.monotonic()

    def left() -> float:
        return given.seconds - (time.monotonic() - start)

    # before the device is used: it does not outlive a fork
    corpus = make_corpus(given.corpus_seconds) if given.corpus is None else np.load(given.corpus)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each number of keys
    rows = Rows(corpus, given.device)
    if given.target is None:
        target = train_target(rows, TARGET * left(), given.device)
        save_target(target, given.out / "target")
    else:
        target = load_target(given.target).to(given.device)
    head = train_head(target, rows, left() - SAVING, given.device)
    save_head(head, target.sizes, given.out / "eagle3")
    print(f"done, {left():.1f} of {given.seconds} s left", flush=True)


if __name__ == "__main__":
    main()
