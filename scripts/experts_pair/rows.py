"""Rows of a corpus to train on.

Rows begin with <|bos|>: every second one is the beginning of a file, the others begin anywhere.
"""

import numpy as np
import torch
from torch import Tensor

from scripts.experts_pair.corpus import BOS

HELD_OUT = 100_000  # tokens at the corpus's end, for the loss that is reported


class Rows:
    """Draws rows of a corpus, which lies on the device."""

    def __init__(self, corpus: np.ndarray, device: str) -> None:
        self.corpus_N = torch.from_numpy(corpus.astype(np.int32)).to(device)
        self.starts_F = (self.corpus_N == BOS).nonzero()[:, 0]
        self.generator = torch.Generator(device).manual_seed(0)

    def draw(self, num_rows: int, length: int) -> Tensor:
        """Draw [num_rows, length] tokens, int64."""
        device, last = self.corpus_N.device, len(self.corpus_N) - HELD_OUT - length
        among = {"generator": self.generator, "device": device}
        anywhere = torch.randint(last, (num_rows,), **among)
        file = torch.randint(len(self.starts_F), (num_rows,), **among)
        anywhere[::2] = self.starts_F[file][::2].clamp(max=last)
        found = self.corpus_N[anywhere[:, None] + torch.arange(length, device=device)].long()
        found[:, 0] = BOS
        return found

    def held_out(self, num_rows: int, length: int) -> Tensor:
        return self.corpus_N[-num_rows * length :].view(num_rows, length).long()
