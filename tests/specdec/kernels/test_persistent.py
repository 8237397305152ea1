"""Products of many rows by programs with roles: the bits of linear.py, and code that can run."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels import linear
from specdec.kernels.gate_up import launch_gate_up
from specdec.kernels.linear import launch_split_linear
from specdec.kernels.persistent.launch import launch_persistent
from specdec.kernels.sum_order import Order, add_parts
from specdec.kernels.tile_rule import suits
from specdec.kernels.tile_shapes import Product, Shape
from specdec.kernels.tiles import Tiles, cut

ONE = Order(1, 1)
SIMPLE = Shape(64, 64, 64, 3, 4)  # of the kernels with one program a tile
SUMS = [(64, 8, 1), (96, 6, 1), (128, 6, 1), (128, 6, 4), (192, 4, 1), (256, 4, 1), (256, 4, 2)]
GATED = [(64, 5, 1), (96, 4, 1), (128, 4, 1), (128, 4, 2), (192, 3, 1), (256, 4, 1), (256, 4, 2)]
WIDE_GATED = [(96, 5, 1), (128, 5, 1), (128, 5, 2), (128, 5, 4)]


def tiles_of(
    block_m: int, stages: int, cuts: int, order: Order, is_serial: bool, block_n: int = 128
) -> Tiles:
    shape = Shape(block_n, block_m, 64, stages, 4, cuts)
    return cut(shape, 4096 if is_serial else 512, order)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("block_m, stages, cuts", SUMS)
@pytest.mark.parametrize(
    "order, is_serial",
    [
        *((ONE, True), (Order(2, 2), True), (Order(2, 2), False)),
        *((Order(4, 4), True), (Order(4, 2), False), (Order(4, 4), False)),
    ],
)
@pytest.mark.parametrize("N, K", [(1024, 4096), (144, 256), (6000, 1280)])
def test_sums_have_the_bits_of_programs_for_a_tile_each(
    block_m, stages, cuts, order, is_serial, N, K, monkeypatch
):
    tiles = tiles_of(block_m, stages, cuts, order, is_serial)
    K += 8 if order == ONE else 0  # the last block is not full
    shape = Shape(128, block_m, 64, stages, 4, cuts)
    if not suits(Product("split", N, K), shape, Order(tiles.splits, tiles.parts)):
        pytest.skip("sums that wait for others do not fit into registers")
    torch.manual_seed(0)
    weight = random(N, K)
    simple = cut(SIMPLE, 64, order)
    monkeypatch.setattr(linear, "tiles_for", lambda *_, **__: simple)
    for T in (1, 33, 256, 300, 1500):
        x = random(T, K)
        parts = launch_split_linear(x, weight)
        if is_serial:
            parts = add_parts(parts)[None]
        found = torch.full_like(parts, float("nan"))
        launch_persistent(found, x, weight, None, tiles)
        assert torch.equal(found, parts), T


@pytest.mark.gpu
@pytest.mark.parametrize(
    "block_n, block_m, stages, cuts",
    [(128, *each) for each in GATED] + [(192, *each) for each in WIDE_GATED],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("N, K", [(1024, 4096), (144, 200), (6000, 1032)])
def test_gated_products_have_the_bits_of_programs_for_a_tile_each(
    block_n, block_m, stages, cuts, has_bias, N, K, monkeypatch
):
    torch.manual_seed(0)
    weight = random(2 * N, K)
    bias = random(2 * N) if has_bias else None
    monkeypatch.setattr("specdec.kernels.gate_up.tiles_for", lambda *_: cut(SIMPLE, 64, ONE))
    tiles = tiles_of(block_m, stages, cuts, ONE, is_serial=True, block_n=block_n)
    for T in (1, 33, 300, 320, 900):
        x = random(T, K)
        expected = launch_gate_up(x, weight, bias)
        found = torch.full_like(expected, float("nan"))
        launch_persistent(found[None], x, weight, bias, tiles, is_gated=True)
        assert torch.equal(found, expected), T


@pytest.mark.gpu
@pytest.mark.parametrize(
    "block_n, block_m, stages, cuts",
    [
        (128, 128, 6, 1),
        (128, 256, 4, 2),
        (192, 128, 5, 1),
        (192, 128, 5, 2),
        (192, 96, 5, 1),
    ],
)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("N, K", [(1024, 4096), (144, 1024), (6000, 1024)])
def test_results_that_are_rounded_at_once_are_the_rounded_sums(
    block_n, block_m, stages, cuts, splits, N, K
):
    """Those of one sum leave late; T below a tile, at its end, and many tiles for each program."""
    order = Order(splits, 1)
    K += 8 if splits == 1 else 0
    if not suits(Product("split", N, K), Shape(block_n, block_m, 64, stages, 4, cuts), order):
        pytest.skip("sums that wait for others do not fit into registers")
    torch.manual_seed(0)
    weight = random(N, K)
    tiles = tiles_of(block_m, stages, cuts, order, is_serial=True, block_n=block_n)
    for T in (1, 33, 256, 300, 3000):
        x = random(T, K)
        sums = torch.full((1, T, N), float("nan"), device="cuda")
        rounded = sums.bfloat16()
        torch.cuda.synchronize()
        plain = tiles_of(128, 4, 1, order, is_serial=True)
        launch_persistent(sums, x, weight, None, plain)
        launch_persistent(rounded, x, weight, None, tiles)
        assert torch.equal(rounded, sums.bfloat16()), T


@pytest.mark.gpu
def test_gates_far_beyond_where_exponentials_overflow(monkeypatch):
    torch.manual_seed(0)
    weight = random(2 * 6000, 1032)
    monkeypatch.setattr("specdec.kernels.gate_up.tiles_for", lambda *_: cut(SIMPLE, 64, ONE))
    for scale in (0.02, 1, 30, 1e6, 1e30):
        x = random(900, 1032) * scale
        expected = launch_gate_up(x, weight, None)
        found = torch.full_like(expected, float("nan"))
        launch_persistent(
            found[None], x, weight, None, tiles_of(256, 4, 1, ONE, True), is_gated=True
        )
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), scale
        assert torch.equal(found.isnan(), expected.isnan()), scale


@pytest.mark.parametrize(
    "block_n, block_m, cuts, splits, kind, words",
    [
        pytest.param(128, 192, 1, 2, "split", (), marks=pytest.mark.slow),
        pytest.param(128, 128, 2, 1, "gate", ("late",), marks=pytest.mark.slow),
        pytest.param(128, 192, 1, 1, "gate", (), marks=pytest.mark.slow),
        pytest.param(128, 256, 2, 1, "gate", ("late",), marks=pytest.mark.slow),
        pytest.param(128, 128, 1, 4, "split", (), marks=pytest.mark.slow),
        pytest.param(128, 128, 2, 4, "split", (), marks=pytest.mark.slow),
        pytest.param(192, 96, 1, 4, "split", (), marks=pytest.mark.slow),
        pytest.param(192, 128, 1, 1, "split", ("late",), marks=pytest.mark.slow),
        pytest.param(192, 128, 1, 2, "split", (), marks=pytest.mark.slow),
        pytest.param(192, 128, 2, 1, "gate", ("late",), marks=pytest.mark.slow),
    ],
)
def test_it_compiles_without_a_gpu(block_n, block_m, cuts, splits, kind, words):
    """In a process without the interpreter, for which kernels are something else."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_persistent"]
    done = subprocess.run(
        [*command, *map(str, (block_n, block_m, cuts, splits, kind)), *words],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shared, num_wgmma, num_spilled = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert num_wgmma > 0
    assert num_spilled == 0
