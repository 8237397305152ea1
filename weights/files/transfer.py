"""Bytes to tensors: read, cast to one dtype, fuse. The only place that moves weights.

Fused tensors are allocated first, then filled piece by piece; what goes to a GPU as it is stored goes by staging.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from weights.files.header import TORCH_DTYPES, TensorEntry
from weights.files.reader import Reader
from weights.files.staging import CopyJob, copy_all
from weights.fuse import fuse_plan
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
    plan = fuse_plan(list(wanted))
    tensors = {
        name: _allocated([wanted[piece] for piece in pieces], placement)
        for name, pieces in plan.items()
    }
    jobs: list[CopyJob] = []
    # disable=None: no bar where nobody watches
    disable = None if placement.progress else True
    with tqdm(
        total=total, unit="B", unit_scale=True, desc=reader.directory.name, disable=disable
    ) as bar:
        for name, pieces in plan.items():
            for piece, part in zip(
                pieces, _parts(tensors[name], [wanted[piece] for piece in pieces]), strict=True
            ):
                if part.is_cuda and part.dtype == reader.dtype(held[piece].name):
                    jobs.append(reader.copy_job(held[piece].name, part))
                else:
                    reader.read_into(held[piece].name, part)
                    bar.update(held[piece].num_bytes)
        for num_bytes in copy_all(jobs, torch.device(placement.device)) if jobs else ():
            bar.update(num_bytes)
    _note_casts([held[name].dtype for name in wanted], placement.dtype, log)
    return tensors


def _allocated(shapes: list[tuple[int, ...]], placement: Placement) -> Tensor:
    """Room for these shapes, one behind the other over rows."""
    rows = sum(shape[0] for shape in shapes)
    return torch.empty(rows, *shapes[0][1:], dtype=placement.dtype, device=placement.device)


def _parts(whole: Tensor, shapes: list[tuple[int, ...]]) -> Iterator[Tensor]:
    first = 0
    for shape in shapes:
        yield whole[first : first + shape[0]]
        first += shape[0]


def _note_casts(stored: list[str], dtype: torch.dtype, log: Log) -> None:
    new = str(dtype).removeprefix("torch.")
    for name, count in Counter(name for name in stored if TORCH_DTYPES[name] != dtype).items():
        log.note(f"{count} tensors stored as {name} are cast to {new}")
