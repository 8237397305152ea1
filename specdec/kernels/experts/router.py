"""The router's product: E logits for each row, as unrounded float32 sums for route.py.

W has few rows, so that K is cut into many splits, else two or three programs would read all of it.
Splits are a function of (E, K) alone, so tiles change no bit.
"""

from functools import cache

import torch
from torch import Tensor

from specdec.kernels import is_hopper, pick, use_triton
from specdec.kernels.invariant import blocked_product
from specdec.kernels.linear import Sums, launch_split_linear
from specdec.kernels.opaque import opaque
from specdec.kernels.sum_order import UNIT, Order
from specdec.kernels.tile_rule import MULTIPROCESSORS, rule_shape
from specdec.kernels.tile_shapes import PARALLEL_ROWS, Product, row_class
from specdec.kernels.tiles import Tiles, cut, dtype_name, of_rows

SPLITS = (2, 4, 8, 16)
ODD_SPLITS = (3, 5, 7, 9, 11, 13, 15)  # where K takes none of these
LEAST_K = 256  # of a split


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Sums:
    """Multiply to split sums [splits, T, E], float32 also where one sum is all.

    No launch since the last synchronisation may write the weight.
    """
    return Sums(_router_sums(x_TD, weight_ED), bias_E)


def _empty(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    splits = router_splits(*weight_ED.shape) if use_triton(x_TD) else 1
    parts = 1 if splits == 1 or x_TD.shape[0] > PARALLEL_ROWS else splits
    return x_TD.new_empty(parts, x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)


@opaque(_empty)
def _router_sums(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return pick(x_TD, launch_router, router_ref)(x_TD, weight_ED)


def launch_router(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    rows = row_class(len(x_TD))
    tiles = router_tiles(rows, *weight_ED.shape, x_TD.dtype, is_hopper(x_TD.device))
    return launch_split_linear(x_TD, weight_ED, torch.float32, tiles=tiles)


def router_splits(E: int, K: int) -> int:
    """Take as many splits as multiprocessors run at a time, of equal lengths, 256 of K at least."""
    tiles = -(-E // 64)
    for counts in (SPLITS, ODD_SPLITS):
        cuts = (n for n in counts if K % (UNIT * n) == 0 and K // n >= LEAST_K)
        if most := max((n for n in cuts if tiles * n <= MULTIPROCESSORS), default=0):
            return most
    return 1


@cache
def router_tiles(rows: int, E: int, K: int, dtype: torch.dtype, has_wgmma: bool) -> Tiles:
    """Choose the tiles of a `row_class` by the rule; a table knows no router."""
    splits = router_splits(E, K)
    order = of_rows(Order(splits, splits), rows)
    product = Product("split", E, K, dtype_name(dtype))
    return cut(rule_shape(product, rows, order, has_wgmma), rows, order)


def router_ref(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return blocked_product(x_TD, weight_ED)[None]
