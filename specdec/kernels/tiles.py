"""Tile shapes of the matrix products, by rule and by table.

The number of splits decides the order of a sum, so it is a function of (N, K, dtype, GPU) only; the
number of rows M chooses the rest (BLOCK_K too: inside a split the order does not depend on it).
tuned.json holds measured entries:
{"GPU": {"kind,N,K,dtype": {"splits", "rows": {"16": {"block_n", "block_k", ...}, "32": ...}}}}
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, TypedDict

import torch
from torch import Tensor

Kind = Literal["split", "whole", "gate"]
ROW_CLASSES = (16, 32, 64, 128, 192, 256, 384, 512, 4096)
MANY_ROWS = ROW_CLASSES[-1]  # every program walks all splits itself


class Shape(TypedDict, total=False):
    """Measured best for one class of row counts."""

    block_n: int
    block_m: int
    block_k: int
    num_stages: int
    num_warps: int


class Entry(TypedDict, total=False):
    """Measured for one weight shape; `rows` by row class, "16" to "4096"."""

    splits: int
    rows: dict[str, Shape]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut."""

    block_n: int
    block_m: int  # a power of two, or for 192 and 384 rows one and a half times that
    block_k: int
    splits: int  # parts of K that are summed apart and added in order
    num_stages: int
    num_warps: int
    is_serial: bool  # one program walks all splits itself, as for many rows


def tiles_for(kind: Kind, x_TK: Tensor, weight_NK: Tensor, num_rows: int | None = None) -> Tiles:
    """The tiles of x W^T. num_rows: a `row_class`; None: that of x."""
    rows = num_rows or row_class(len(x_TK))
    return choose_tiles(kind, rows, *weight_NK.shape, x_TK.dtype, gpu_name(x_TK.device))


@cache
def choose_tiles(kind: Kind, num_rows: int, N: int, K: int, dtype: torch.dtype, gpu: str) -> Tiles:
    """The tiles of a product of `num_rows` rows (a `row_class`) with W [N, K].

    kind: "split", sums for a reader; "whole", finished; "gate", two tiles of W at a time.
    """
    key = f"{kind},{N},{K},{str(dtype).removeprefix('torch.')}"
    entry = _table().get(gpu, {}).get(key, Entry())
    is_wide = dtype == torch.float32
    splits = entry.get("splits", _default_splits(N, K)) if kind == "split" else 1
    shape = entry.get("rows", {}).get(str(num_rows), Shape())
    block = 64 if is_wide or num_rows <= 64 else 128
    return Tiles(
        block_n=shape.get("block_n", 64 if kind == "gate" else block),
        block_m=shape.get("block_m", min(block, num_rows)),
        block_k=shape.get("block_k", 32 if is_wide else (128 if K % 128 == 0 else 64)),
        splits=splits,
        num_stages=shape.get("num_stages", 3 if is_wide or num_rows > 64 else 4),
        num_warps=shape.get("num_warps", 8 if block == 128 else 4),
        is_serial=num_rows == MANY_ROWS,
    )


def row_class(M: int) -> int:
    """The first of ROW_CLASSES that is no smaller, or the last: row counts that share tiles."""
    return next((size for size in ROW_CLASSES if size >= M), MANY_ROWS)


def row_pieces(block_m: int) -> tuple[int, int]:
    """A tile's rows in powers of two, as the kernels take them: 192 are 128 + 64, 128 are 128."""
    whole = 1 << (block_m.bit_length() - 1)
    return whole, block_m - whole


def gpu_name(device: torch.device) -> str:
    """The GPU's name as the table has it; "cpu" in the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _default_splits(N: int, K: int) -> int:
    """Enough programs to keep every multiprocessor reading, with at least 1,024 of K in each."""
    fitting = (n for n in (2, 4) if K // n >= 1024 and N // 64 * n <= 264)
    return max(fitting, default=1)


@cache
def _table() -> dict[str, dict[str, Entry]]:
    text = (files("specdec.kernels") / "tuned.json").read_text()
    table: dict[str, dict[str, Entry]] = json.loads(text)
    return table
