"""Bytes to tensors: read, cast to one dtype, fuse. The only place that moves weights.

q, k, v become one product and gate, up another: fewer, larger matrices. Fused tensors are allocated
first, then filled piece by piece; what a GPU takes as it is stored goes through staging.py.
"""

from collections import Counter

import torch
from torch import Tensor

from weights.bars import bar
from weights.files.header import TORCH_DTYPES, TensorEntry
from weights.files.reader import Reader
from weights.files.staging import CopyJob, copy_all
from weights.report import Log
from weights.shapes import Shapes

# which names make up one: their weights and biases are concatenated over rows
FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def read_tensors(
    reader: Reader,
    wanted: Shapes,
    held: dict[str, TensorEntry],
    log: Log,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool,
) -> dict[str, Tensor]:
    """Everything in `wanted` under the fused names; `log` notes casts, a terminal shows a bar."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}  # by unfused name: views of `tensors`
    for name, pieces in fuse_plan(list(wanted)).items():
        rows = [wanted[piece][0] for piece in pieces]
        shape = (sum(rows), *wanted[pieces[0]][1:])
        tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        parts |= zip(pieces, torch.split(tensors[name], rows), strict=True)
    total = sum(held[name].num_bytes for name in wanted)
    options = {"total": total, "unit": "B", "unit_scale": True, "desc": reader.directory.name}
    with bar(is_wanted=progress, **options) as shown:
        jobs: list[CopyJob] = []
        for name, part in parts.items():
            entry = held[name]
            if part.is_cuda and part.dtype == reader.dtype(entry.name):
                jobs.append(reader.copy_job(entry.name, part))
            else:
                reader.read_into(entry.name, part)
                shown.update(entry.num_bytes)
        for num_bytes in copy_all(jobs, torch.device(device)) if jobs else ():
            shown.update(num_bytes)
    _note_casts([held[name].dtype for name in wanted], dtype, log)
    return tensors


def fuse_plan(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Fused name -> the names to concatenate, in order; `names` are unfused and complete."""
    return dict(map(_fused, names))


def _fused(name: str) -> tuple[str, tuple[str, ...]]:
    for whole, pieces in FUSED.items():
        for piece in pieces:
            if f".{piece}." in name:
                return name.replace(piece, whole), tuple(name.replace(piece, p) for p in pieces)
    return name, (name,)


def _note_casts(stored: list[str], dtype: torch.dtype, log: Log) -> None:
    new = str(dtype).removeprefix("torch.")
    for name, count in Counter(name for name in stored if TORCH_DTYPES[name] != dtype).items():
        log.note(f"{count} tensors stored as {name} are cast to {new}")
