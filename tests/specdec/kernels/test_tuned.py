"""A row's bits do not depend on how many rows there are, over every entry of the tuned table."""

import itertools
import json
from importlib.resources import files

import pytest
import torch

from specdec.kernels import gate_up, is_hopper, linear
from specdec.kernels.gate_up import gate_up_ref, launch_gate_up
from specdec.kernels.linear import Sums, launch_linear, launch_split_linear, linear_ref
from specdec.kernels.sum_order import Order
from specdec.kernels.tile_rule import candidates
from specdec.kernels.tile_shapes import ROW_CLASSES, Product, Shape, row_pieces
from specdec.kernels.tiles import cut, of_rows

ENTRIES = json.loads((files("specdec.kernels") / "tuned.json").read_text())
SHAPES = sorted({tuple(key.split(",")[:3]) for table in ENTRIES.values() for key in table})
ROW_COUNTS = (1, 6, 17, 64, 65, 128, 150, 192, 200, 256, 300, 384, 512, 1000, 8192)
PRODUCTS = {
    "split": lambda x, weight: Sums(launch_split_linear(x, weight), None).finish(torch.float32),
    "whole": lambda x, weight: launch_linear(x, weight, None, torch.float32),
    "gate": lambda x, weight: launch_gate_up(x, weight, None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind, N, K", SHAPES)
def test_rows_are_bit_identical_for_every_number_of_rows(kind, N, K):
    torch.manual_seed(0)
    product, N, K = PRODUCTS[kind], int(N), int(K)
    most = max(ROW_COUNTS) if N < 100_000 else 1000
    x = torch.randn(most, K, device="cuda").bfloat16()
    weight = (torch.randn(N, K, device="cuda") * 0.02).bfloat16()
    whole = product(x, weight)
    if kind != "gate":
        torch.testing.assert_close(
            whole[:64], x[:64].float() @ weight.float().T, rtol=1e-3, atol=2e-3
        )
    for rows in (count for count in ROW_COUNTS if count <= most):
        for first in {0, min(5, most - rows)}:
            part = product(x[first : first + rows].contiguous(), weight)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_alike_in_the_interpreter(kind, dtype):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    torch.manual_seed(0)
    x, weight = torch.randn(70, 64).to(dtype), torch.randn(64, 64).to(dtype)
    whole = PRODUCTS[kind](x, weight)
    for rows in (1, 17, 64):
        # numpy multiplies here, so a row's bits do depend on its tile
        torch.testing.assert_close(
            PRODUCTS[kind](x[:rows], weight), whole[:rows], rtol=2e-3, atol=2e-3
        )


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70, 97])
def test_tiles_of_one_and_a_half_powers_of_two_cover_every_row(kind, rows, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    torch.manual_seed(0)
    tiles = cut(Shape(32, 48, 64, 2, 4), 64, Order(4, 2) if kind == "split" else Order(1, 1))
    for module in (gate_up, linear):
        monkeypatch.setattr(module, "tiles_for", lambda *_, **__: tiles)
    x, weight = torch.randn(rows, 512), torch.randn(80, 512)
    expected = (
        gate_up_ref(x, weight, None) if kind == "gate" else linear_ref(x, weight, None, x.dtype)
    )
    torch.testing.assert_close(PRODUCTS[kind](x, weight), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "block_m, pieces",
    [(16, (16, 0)), (96, (64, 32)), (128, (128, 0)), (160, (128, 32)), (192, (128, 64))],
)
def test_rows_of_a_tile_are_powers_of_two(block_m, pieces):
    assert row_pieces(block_m) == pieces


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, splits", [("split", 1), ("split", 2), ("split", 4), ("whole", 1), ("gate", 1)]
)
def test_every_candidate_of_tuning_gives_the_same_bits(kind, splits, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2048, 2048, device="cuda").bfloat16()
    weight = (torch.randn(3072, 2048, device="cuda") * 0.02).bfloat16()
    expected = None
    product, has_wgmma = Product(kind, *weight.shape), is_hopper(x.device)
    orders = [Order(splits, parts) for parts in (1, 2, 4) if parts <= splits]
    for rows, order in itertools.product(reversed(ROW_CLASSES), orders):
        for shape in candidates(product, rows, of_rows(order, rows), has_wgmma):
            tiles = cut(shape, rows, order)
            for module in (gate_up, linear):
                monkeypatch.setattr(module, "tiles_for", lambda *_, tiles=tiles, **__: tiles)
            found = PRODUCTS[kind](x[:rows].contiguous(), weight)
            expected = found if expected is None else expected
            assert torch.equal(found, expected[:rows]), (rows, order, shape)
