"""A vocabulary that is cut for several GPUs: a rank's columns, and how ranks join what they found.

A rank has the logits of its own ids, for all rows. It reduces them to something small, ranks gather
that, and each goes on with the same arithmetic on the same numbers. What is joined along the ids
lies as it does on one GPU, so the readers of a whole vocabulary read it. Where nothing is cut,
`cut` is None everywhere, and nothing is gathered.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weights.shard import Shard, vocabulary_block, vocabulary_borders

FEW_ROWS = 16  # up to these, small tiles fill the GPU
FEWEST_COLUMNS = 64  # of a tile; blocks of a vocabulary of fewer than 512 ids are smaller


class Exchange(Protocol):
    """All ranks call it in the same order, with tensors of one shape and dtype."""

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, [n, *x.shape]."""


@dataclass(frozen=True, slots=True)
class CutIds:
    """This rank's ids of a vocabulary of `vocab_size`."""

    shard: Shard
    vocab_size: int
    exchange: Exchange

    @property
    def ids(self) -> range:
        return self.shard.ids_of(self.vocab_size)

    @property
    def first(self) -> int:
        return self.ids.start

    def tile_counts(self, ids_each: int) -> list[int]:
        """Count each rank's tiles of so many ids."""
        borders = vocabulary_borders(self.vocab_size, self.shard.size)
        return [-(-(end - first) // ids_each) for first, end in pairwise(borders)]

    def joined(self, x: Tensor, dim: int, ids_each: int = 1) -> Tensor:
        """Join what ranks have of each tile, in the order of ids along `dim`.

        x: this rank's tiles, and any number after them up to those of the rank with most
        """
        counts = self.tile_counts(ids_each)
        padding = max(counts) - x.shape[dim]
        if padding > 0:
            x = F.pad(x, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, padding))
        parts = self.exchange.gather(x)
        found = (part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True))
        return torch.cat(list(found), dim)

    def greatest(self, x: Tensor) -> Tensor:
        """Find the greatest of all ranks, element by element; NaN if one is."""
        return self.exchange.gather(x).amax(dim=0)


def greatest_over_ids(x: Tensor, cut: CutIds | None) -> Tensor:
    """Find the greatest of [..., V], [..., 1]; NaN if one is."""
    top = x.amax(dim=-1, keepdim=True)
    return top if cut is None else cut.greatest(top)


def columns_of(ids: Tensor, x_XV: Tensor, cut: CutIds | None) -> tuple[Tensor, Tensor]:
    """Find the columns of ids and whether x has them; one that it lacks has any column."""
    if cut is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    column = ids - cut.first
    is_here = (column >= 0) & (column < x_XV.shape[-1])
    return column.clamp(0, x_XV.shape[-1] - 1), is_here


def num_ids(x_XV: Tensor, cut: CutIds | None) -> int:
    """Count the ids of the whole vocabulary. x: logits of this rank's"""
    return x_XV.shape[-1] if cut is None else cut.vocab_size


def first_id(cut: CutIds | None) -> int:
    return 0 if cut is None else cut.first


def tile_columns_of(x_XV: Tensor, cut: CutIds | None) -> int:
    """Choose the columns of a tile of logits, which lies in one block of ids (from 512 on)."""
    columns = 1024 if len(x_XV) <= FEW_ROWS else 2048
    return min(columns, max(vocabulary_block(num_ids(x_XV, cut)), FEWEST_COLUMNS))
