"""The tiles that a matrix product takes: by the user's table, then the shipped one, then the rule.

The number of splits decides the order of a sum, so it is a function of (N, K, dtype, GPU) only, by
the shipped table or the rule: tuning never changes a token. The number of rows M chooses the rest
(BLOCK_K too: inside a split the order does not depend on it).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from specdec.kernels import is_hopper, jit, tl
from specdec.kernels.tables import NONE, Entry, shipped_table, user_table
from specdec.kernels.tile_rule import rule_shape, rule_splits
from specdec.kernels.tile_shapes import (
    PARALLEL_ROWS,
    ROW_CLASSES,
    Kind,
    Product,
    Shape,
    row_class,
    rows_of_tiles,
)

Source = Literal["user", "shipped", "rule"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut: its Shape and its splits."""

    block_n: int
    block_m: int  # as in Shape
    block_k: int
    splits: int  # parts of K that are summed apart and added in order
    num_stages: int
    num_warps: int
    cuts: int  # as in Shape
    is_serial: bool  # a program walks all splits itself, as for many rows


def tiles_for(kind: Kind, x_TK: Tensor, weight_NK: Tensor, num_rows: int | None = None) -> Tiles:
    """Choose the tiles of x W^T. num_rows: a `row_class`; None: that of x."""
    rows = num_rows or row_class(len(x_TK))
    device = x_TK.device
    gpu = gpu_name(device)
    return choose_tiles(kind, rows, *weight_NK.shape, x_TK.dtype, gpu, is_hopper(device))


def tiles_for_columns(whole: Tiles, x_TK: Tensor, weight_NK: Tensor) -> Tiles:
    """Choose linear.py's tiles for a part of a product's columns. whole: the tiles of all columns.

    The rule decides: a table may give a product with this many columns other splits.
    """
    return _of_columns(row_class(len(x_TK)), *weight_NK.shape, x_TK.dtype, whole.splits)


@cache
def _of_columns(num_rows: int, N: int, K: int, dtype: torch.dtype, splits: int) -> Tiles:
    product = Product("split", N, K, dtype_name(dtype))
    return cut(rule_shape(product, num_rows, splits), num_rows, splits)


@cache
def choose_tiles(
    kind: Kind, num_rows: int, N: int, K: int, dtype: torch.dtype, gpu: str, has_wgmma: bool = False
) -> Tiles:
    """Choose the tiles of a product of `num_rows` rows (a `row_class`) with W [N, K]."""
    product = Product(kind, N, K, dtype_name(dtype))
    splits = choose_splits(product, gpu)
    tables = (user_table(), shipped_table())
    entries = (table.get(gpu, {}).get(product, NONE) for table in tables)
    measured = (entry.rows[num_rows] for entry in entries if num_rows in entry.rows)
    fitting = (shape for shape in measured if has_wgmma or not shape.cuts)
    shape = next(fitting, None) or rule_shape(product, num_rows, splits, has_wgmma)
    return cut(shape, num_rows, splits)


def choose_splits(product: Product, gpu: str) -> int:
    """Choose the number of splits, never by the user's table."""
    if product.kind != "split":
        return 1
    entry = shipped_table().get(gpu, {}).get(product)
    return rule_splits(product.N, product.K) if entry is None else entry.splits


def source_of(product: Product, gpu: str) -> Source:
    """Say where a product's tiles come from, if not some of its classes from elsewhere."""
    if _is_complete(user_table().get(gpu, {}).get(product, NONE)):
        return "user"
    return "shipped" if _is_complete(shipped_table().get(gpu, {}).get(product, NONE)) else "rule"


def _is_complete(entry: Entry) -> bool:
    return set(entry.rows) == set(ROW_CLASSES)


def cut(shape: Shape, rows: int, splits: int) -> Tiles:
    return Tiles(splits=splits, is_serial=rows > PARALLEL_ROWS, **shape._asdict())


def empty_rows(like: Tensor, T: int, *width: int) -> Tensor:
    """Allocate [T, *width], in memory up to the end of the last tile: see `rows_to_read`."""
    return like.new_empty(rows_of_tiles(T), *width)[:T]


def rows_to_read(x_TK: Tensor) -> int:
    """Count rows for a descriptor of x: T, and rows after it in its storage up to a tile's end.

    The copy engine takes half as long again for a tile that lies half outside the matrix. What
    it reads there may be anything: each row of x has columns of its own in the products.
    """
    storage = x_TK.untyped_storage().nbytes() // x_TK.element_size()
    last = storage - x_TK.storage_offset() - x_TK.shape[1]
    return max(min(last // x_TK.stride(0) + 1, rows_of_tiles(len(x_TK))), len(x_TK))


@cache
def gpu_name(device: torch.device) -> str:
    """Name the GPU as the table does; "cpu" in the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as a table does: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def num_tiles(N: int, T: int, tiles: Tiles) -> int:
    """Count the output tiles of a product; `place_of` numbers them."""
    return -(-N // tiles.block_n) * -(-T // tiles.block_m)


@jit
def place_of(tile, n_tiles, m_tiles):
    """Place tiles in bands along the rows, rows first: programs that share W tiles run together."""
    BAND: tl.constexpr = 8
    band = tile // (BAND * n_tiles)
    height = tl.minimum(m_tiles - band * BAND, BAND)
    inside = tile % (BAND * n_tiles)
    return inside // height, band * BAND + inside % height


@jit
def split_blocks(K, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Count the blocks of K in a split, whose length is a multiple of 256 for every BLOCK_K."""
    return (
        tl.cdiv(tl.cdiv(K, 256), SPLITS) * (256 // BLOCK_K) if SPLITS > 1 else tl.cdiv(K, BLOCK_K)
    )
