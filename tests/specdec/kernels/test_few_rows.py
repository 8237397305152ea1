"""Products of few rows whose weights come ahead: the bits of linear.py and gate_up.py."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels import few_rows, gate_up, linear
from specdec.kernels.few_rows import has_few_rows, launch_few_rows
from specdec.kernels.fp8.weight import E4M3
from specdec.kernels.needed import needed_while
from specdec.kernels.sum_order import Order
from specdec.kernels.tile_shapes import SHARED_MEMORY, Shape, rows_of_tiles
from specdec.kernels.tiles import Tiles, choose_tiles, cut

ONE = Order(1, 1)
SUMS = [(64, 16, 256, 5), (64, 16, 64, 4), (64, 32, 128, 7), (64, 32, 256, 4), (128, 32, 128, 4)]
SUMS += [(64, 64, 128, 5), (128, 64, 128, 4)]
GATED = [(64, 16, 128, 5), (128, 16, 128, 3), (64, 32, 128, 5), (128, 32, 128, 3)]
GATED += [(64, 64, 128, 4)]
NUMS_ROWS = 1, 6, 16, 17, 32, 33, 48, 64

SHIPPED = [("split", 6144, 4096), ("split", 4096, 4096), ("gate", 28672, 4096)]
SHIPPED += [("split", 4096, 14336), ("split", 6144, 8192)]  # the last of an EAGLE-3 draft


def tiles_of(shape: tuple[int, int, int, int], order: Order = ONE) -> Tiles:
    return cut(Shape(*shape, num_warps=4), shape[1], order)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def rows(T: int, K: int) -> torch.Tensor:
    """T rows in memory that goes on to the end of a tile, with rows that must not matter."""
    x = torch.full((rows_of_tiles(T), K), float("nan"), device="cuda", dtype=torch.bfloat16)[:T]
    return x.copy_(random(T, K))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SUMS)
@pytest.mark.parametrize(
    "order, N, K, first",
    [
        *((Order(1, 1), 6144, 4096, 0), (Order(1, 1), 6104, 3144, 0)),
        *((Order(2, 2), 4096, 2048, 2048), (Order(2, 2), 4056, 1536, 2048)),
        *((Order(4, 2), 4096, 2048, 0), (Order(4, 2), 4056, 3072, 2048)),
        *((Order(4, 4), 1024, 3072, 0), (Order(2, 1), 4096, 1024, 0)),
    ],
)
def test_sums_have_the_bits_of_linear(shape, order, N, K, first, monkeypatch):
    torch.manual_seed(0)
    tiles = tiles_of(shape, order)
    weight = random(N, K)
    monkeypatch.setattr(linear, "tiles_for", lambda *_, **__: tiles)
    for T in NUMS_ROWS:
        x = rows(T, K)
        found = []
        for is_ahead in (True, False):
            monkeypatch.setattr(linear, "has_few_rows", lambda *_, is_=is_ahead: is_)
            found.append(linear.launch_split_linear(x, weight, torch.bfloat16, first)[..., first:])
        assert found[1].isfinite().all()
        assert torch.equal(*found), (T, (found[0] != found[1]).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SUMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_whole_products_have_the_bits_of_linear(shape, dtype, has_bias, monkeypatch):
    torch.manual_seed(0)
    N, K = 5000, 4096
    weight = random(N, K)
    bias = random(N) if has_bias else None
    monkeypatch.setattr(linear, "tiles_for", lambda *_: tiles_of(shape))
    for T in NUMS_ROWS:
        x = rows(T, K)
        found = []
        for is_ahead in (True, False):
            monkeypatch.setattr(linear, "has_few_rows", lambda *_, is_=is_ahead: is_)
            found.append(linear.launch_linear(x, weight, bias, dtype))
        assert found[1].isfinite().all()
        assert torch.equal(*found), (T, (found[0] != found[1]).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GATED)
@pytest.mark.parametrize("N, K", [(2048, 4096), (5000, 1032)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products_have_the_bits_of_gate_up(shape, N, K, has_bias, monkeypatch):
    torch.manual_seed(0)
    weight = random(2 * N, K)
    bias = random(2 * N) if has_bias else None
    monkeypatch.setattr(gate_up, "tiles_for", lambda *_: tiles_of(shape))
    for T in NUMS_ROWS:
        x = rows(T, K)
        x[0] *= 50  # exponentials of 0 and of infinity
        found = []
        for is_ahead in (True, False):
            monkeypatch.setattr(gate_up, "has_few_rows", lambda *_, is_=is_ahead, **__: is_)
            found.append(gate_up.launch_gate_up(x, weight, bias))
        assert torch.equal(*found), (T, (found[0] != found[1]).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows, shape", [(32, (64, 32, 128, 5)), (64, (64, 16, 256, 5))])
def test_inputs_are_those_that_the_kernel_before_writes(num_rows, shape):
    """A chain in a graph, each product of the result of the one before: no x is read too early.

    64 tiles, and 256, of which programs make one after another.
    """
    torch.manual_seed(0)
    weights = [random(4096, 4096) / 64 for _ in range(12)]
    tiles = tiles_of(shape)
    x = rows(num_rows, 4096)
    outs = [torch.empty(num_rows, 4096, device="cuda").bfloat16() for _ in weights]

    def chain() -> None:
        y = x
        for weight, out in zip(weights, outs, strict=True):
            launch_few_rows(out, y, weight, None, tiles)
            y = out

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x.copy_(random(num_rows, 4096))
        graph.replay()
        y = x
        for weight, out in zip(weights, outs, strict=True):
            expected = torch.empty_like(out)
            linear._launch(expected, y, weight, None, tiles, 0)
            torch.cuda.synchronize()
            assert torch.equal(out, expected)
            y = expected


def test_which_products_it_serves(monkeypatch):
    usual = tiles_of((64, 32, 128, 5), Order(4, 2))
    x = torch.zeros(32, 256, dtype=torch.bfloat16)
    assert not has_few_rows(x, usual)  # on a CPU
    monkeypatch.setattr(few_rows, "is_hopper", lambda _: True)
    assert has_few_rows(x, usual)
    assert has_few_rows(x, tiles_of((128, 32, 128, 3)), is_gated=True)
    assert not has_few_rows(x.float(), usual)
    assert has_few_rows(x, tiles_of((64, 64, 128, 4)), is_gated=True)
    assert not has_few_rows(x, tiles_of((64, 48, 128, 5)))
    assert not has_few_rows(x, tiles_of((64, 128, 128, 3)))
    assert not has_few_rows(x, tiles_of((64, 64, 64, 3)))  # little of K ahead
    assert not has_few_rows(x, tiles_of((256, 32, 64, 4)), is_gated=True)  # too many registers
    assert not has_few_rows(x, tiles_of((256, 32, 64, 6)))  # with results too much shared memory
    assert not has_few_rows(x, tiles_of((64, 32, 32, 8)))  # no swizzled tile
    assert not has_few_rows(x[:, :252].contiguous(), usual)
    assert not has_few_rows(x, cut(Shape(64, 32, 128, 5, 8), 32, ONE))
    assert not has_few_rows(x, cut(Shape(64, 32, 128, 5, 4), 4096, Order(2, 2)))  # splits in turn
    assert has_few_rows(x, tiles_of((64, 64, 128, 5), Order(4, 2)))
    assert not has_few_rows(x, tiles_of((128, 64, 128, 4), Order(4, 2)))  # two sums wait
    with needed_while(torch.ones(1, dtype=torch.int64)):
        assert not has_few_rows(x, usual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_it_serves_the_tiles_of_an_8b_model(monkeypatch, dtype):
    """Those that are shipped, and the rule's for 8 bits."""
    monkeypatch.setattr(few_rows, "is_hopper", lambda _: True)
    for kind, N, K in SHIPPED:
        for rows in few_rows.ROWS:
            tiles = choose_tiles(kind, rows, N, K, dtype, "NVIDIA H200", has_wgmma=True)
            x = torch.zeros(rows, K, dtype=dtype)
            assert has_few_rows(x, tiles, is_gated=kind == "gate"), (kind, N, K, rows)


@pytest.mark.parametrize(
    "shape, kind",
    [
        ((64, 32, 128, 5), "gate"),
        pytest.param((128, 32, 128, 3), "gate", marks=pytest.mark.slow),
        pytest.param((64, 16, 256, 5), "split", marks=pytest.mark.slow),
        pytest.param((64, 64, 128, 4), "gate", marks=pytest.mark.slow),
        pytest.param((128, 64, 128, 4), "split", marks=pytest.mark.slow),
        pytest.param((64, 64, 128, 5), "walk", marks=pytest.mark.slow),
    ],
)
def test_weights_are_asked_for_before_the_wait(shape, kind):
    """Compiled in a process without the interpreter, for which kernels are something else."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_few_rows"]
    done = subprocess.run(
        [*command, *map(str, shape), kind], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shared, num_spilled, num_early = map(int, done.stdout.split())
    assert shared <= SHARED_MEMORY
    assert num_spilled == 0
    assert num_early > 0
