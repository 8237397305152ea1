"""The tiles that a matrix product takes: by the user's table, then the shipped one, then the rule.

The splits that order a sum follow from the weight's shape (sum_order.py), so tuning never changes a
token. Up to PARALLEL_ROWS rows they are made by programs for neighbouring ones each, whose parts
the reader adds: the number of parts is the shipped table's or the rule's, the same for every number
of rows, since graphs that torch.compile traced have it. Only some columns of a weight, which it
never traces, leave one part of more than PUSHED_ROWS rows. The number of rows chooses the rest.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from specdec.kernels import is_hopper, jit, tl
from specdec.kernels.sum_order import Order, Whole, splits_of_part
from specdec.kernels.tables import NONE, Entry, shipped_table, user_table
from specdec.kernels.tile_rule import rule_parts, rule_shape, suits
from specdec.kernels.tile_shapes import (
    FP8,
    PARALLEL_ROWS,
    ROW_CLASSES,
    Kind,
    Product,
    Shape,
    row_class,
    rows_of_tiles,
)

MOST_WALKED = 2  # splits of a program for few rows: sums that wait take registers
PUSHED_ROWS = 64  # up to which each split of some columns is a part, so that programs fill a GPU

Source = Literal["user", "shipped", "rule"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is cut: its Shape and its Order."""

    block_n: int
    block_m: int  # as in Shape
    block_k: int
    splits: int  # as in Order
    parts: int
    num_stages: int
    num_warps: int
    cuts: int  # as in Shape
    is_serial: bool  # for many rows: a program walks all splits, and leaves one part

    @property
    def walked(self) -> int:
        """Count the splits that a program adds."""
        return self.splits // self.parts


def tiles_for(
    kind: Kind,
    x_TK: Tensor,
    weight_NK: Tensor,
    num_rows: int | None = None,
    whole: Whole | None = None,
) -> Tiles:
    """Choose the tiles of x W^T.

    num_rows: a `row_class`; None: that of x
    whole:    the shape of which W is some rows, or neighbouring columns; None: W is whole
    """
    rows = num_rows or row_class(len(x_TK))
    device = x_TK.device
    gpu = gpu_name(device)
    return choose_tiles(kind, rows, *weight_NK.shape, x_TK.dtype, gpu, is_hopper(device), whole)


def tiles_for_columns(whole: Tiles, x_TK: Tensor, weight_NK: Tensor) -> Tiles:
    """Choose linear.py's tiles for a part of a product's columns. whole: the tiles of all columns.

    The rule decides: tables have measured a product with this many columns in another order.
    """
    order = Order(whole.splits, whole.parts)
    return _of_columns(row_class(len(x_TK)), *weight_NK.shape, x_TK.dtype, order)


@cache
def _of_columns(num_rows: int, N: int, K: int, dtype: torch.dtype, order: Order) -> Tiles:
    product = Product("split", N, K, dtype_name(dtype))
    return cut(rule_shape(product, num_rows, order), num_rows, order)


@cache
def choose_tiles(
    kind: Kind,
    num_rows: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    gpu: str,
    has_wgmma: bool = False,
    whole: Whole | None = None,
) -> Tiles:
    """Choose the tiles of a product of `num_rows` rows (a `row_class`) with W [N, K]."""
    product = Product(kind, N, K, dtype_name(dtype))
    order = of_rows(choose_order(product, gpu, whole), num_rows)
    if num_rows > most_rows_in_parts(K, whole):
        order = Order(order.splits, 1)
    tables = (user_table(), shipped_table())
    entries = (table.get(gpu, {}).get(product, NONE) for table in tables)
    measured = (entry.rows[num_rows] for entry in entries if num_rows in entry.rows)
    fitting = (s for s in measured if suits(product, s, order) and (has_wgmma or not s.cuts))
    shape = next(fitting, None) or rule_shape(product, num_rows, order, has_wgmma)
    return cut(shape, num_rows, order)


def choose_order(product: Product, gpu: str, whole: Whole | None = None) -> Order:
    """Choose the order of sums up to PARALLEL_ROWS rows, never by the user's table.

    whole: as in tiles_for. Some of a weight's columns leave all parts, which are added on their way
        to other GPUs; where rows are dealt out to these, there is one.
    """
    if product.kind != "split":
        return Order(1, 1)
    N, K = product.N, product.K
    splits = splits_of_part(N, K, whole, product.dtype == FP8)
    if _has_columns(whole, K):
        return Order(splits, splits)
    entry = shipped_table().get(gpu, {}).get(product)
    parts = rule_parts(N, K) if entry is None else entry.parts
    return Order(splits, min(max(parts, splits // MOST_WALKED), splits))


def most_rows_in_parts(K: int, whole: Whole | None) -> int:
    """Count the rows up to which a product may leave several parts. whole: as in tiles_for"""
    return PUSHED_ROWS if _has_columns(whole, K) else PARALLEL_ROWS


def _has_columns(whole: Whole | None, K: int) -> bool:
    return whole is not None and whole[1] != K


def of_rows(order: Order, num_rows: int) -> Order:
    """With many rows a program walks all splits."""
    return order if num_rows <= PARALLEL_ROWS else Order(order.splits, 1)


def source_of(product: Product, gpu: str) -> Source:
    """Say where a product's tiles come from, if not some of its classes from elsewhere."""
    order = choose_order(product, gpu)
    if _is_complete(user_table().get(gpu, {}).get(product, NONE), product, order):
        return "user"
    shipped = shipped_table().get(gpu, {}).get(product, NONE)
    return "shipped" if _is_complete(shipped, product, order) else "rule"


def _is_complete(entry: Entry, product: Product, order: Order) -> bool:
    return set(fitting_rows(entry, product, order)) == set(ROW_CLASSES)


def fitting_rows(entry: Entry, product: Product, order: Order) -> dict[int, Shape]:
    """Leave out the tiles of an entry that were measured for an order in which they cannot serve.

    order: up to PARALLEL_ROWS rows
    """
    found = entry.rows.items()
    return {n: shape for n, shape in found if suits(product, shape, of_rows(order, n))}


def cut(shape: Shape, rows: int, order: Order) -> Tiles:
    order = of_rows(order, rows)
    is_serial = rows > PARALLEL_ROWS
    return Tiles(**order._asdict(), is_serial=is_serial, **shape._asdict())


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
