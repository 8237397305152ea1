"""Bytes to tensors: read, cast to one dtype, fuse. The only place that moves weights."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from weights.fuse import fuse_plan
from weights.header import TORCH_DTYPES, TensorEntry
from weights.reader import Reader
from weights.report import Log
from weights.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where tensors go and whether a bar shows it, on a terminal only."""

    dtype: torch.dtype
    device: torch.device | str
    progress: bool


def read_tensors(
    reader: Reader, wanted: Shapes, held: dict[str, TensorEntry], placement: Placement, log: Log
) -> dict[str, Tensor]:
    """Everything in `wanted` under the fused names; casts are noted in `log`."""
    total = sum(held[name].num_bytes for name in wanted)
    tensors: dict[str, Tensor] = {}
    # disable=None: no bar where nobody watches
    disable = None if placement.progress else True
    with tqdm(total=total, unit="B", unit_scale=True, desc=reader.directory.name, disable=disable) as bar:
        for name, pieces in fuse_plan(list(wanted)).items():
            parts = []
            for piece in pieces:
                parts.append(reader.read(held[piece].name, placement.device).to(placement.dtype))
                bar.update(held[piece].num_bytes)
            tensors[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    _note_casts([held[name].dtype for name in wanted], placement.dtype, log)
    return tensors


def _note_casts(stored: list[str], dtype: torch.dtype, log: Log) -> None:
    new = str(dtype).removeprefix("torch.")
    for name, count in Counter(name for name in stored if TORCH_DTYPES[name] != dtype).items():
        log.note(f"{count} tensors stored as {name} are cast to {new}")
