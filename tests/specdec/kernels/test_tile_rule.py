"""The rule and its candidates: what a GPU can run, few, and close to what was measured."""

import pytest

from specdec.kernels.sum_order import Order
from specdec.kernels.tile_rule import (
    candidates,
    clocks,
    rule_parts,
    rule_shape,
    suits,
    sums_held,
)
from specdec.kernels.tile_shapes import (
    FP8,
    KINDS,
    ROW_CLASSES,
    SHARED_MEMORY,
    Product,
    Shape,
    bytes_of,
    problem_of,
    rows_at_once,
)
from specdec.kernels.tiles import of_rows

ONE = Order(1, 1)
ORDERS = [*((kind, ONE) for kind in KINDS), ("split", Order(4, 4)), ("split", Order(4, 2))]
ORDERS += [("split", Order(2, 2)), ("split", Order(2, 1))]


@pytest.mark.parametrize("kind, order", ORDERS)
@pytest.mark.parametrize("rows", ROW_CLASSES)
@pytest.mark.parametrize("has_wgmma", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_candidates_are_few_and_fit_into_a_multiprocessor(kind, order, rows, has_wgmma, dtype):
    product = Product(kind, 4096, 4096, dtype)
    if dtype == FP8 and order.splits > 2:
        pytest.skip("8-bit products have two splits at most")
    order = of_rows(order, rows)
    found = candidates(product, rows, order, has_wgmma)
    assert 2 <= len(found) == len(set(found)) <= 24
    for shape in found:
        assert problem_of(product, rows, shape) is None
        assert bytes_of(product, shape) <= SHARED_MEMORY
        held = sums_held(product, shape, order.walked)
        is_waiting = shape.cuts or order.walked > 1
        assert held <= (200 if is_waiting else 160), "of 255 registers of a thread"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROW_CLASSES)
def test_persistent_tiles_are_for_many_rows_of_a_hopper_gpu(kind, rows):
    product = Product(kind, 4096, 4096)
    found = [s for s in candidates(product, rows, ONE, has_wgmma=True) if s.cuts]
    assert (found != []) == (kind != "whole" and rows >= 160)
    assert not any(s.cuts for s in candidates(product, rows, ONE))
    ragged = Product(kind, 4104, 4096)
    assert not any(s.cuts for s in candidates(ragged, rows, ONE, has_wgmma=True))


def test_the_rule_takes_one_of_the_candidates():
    for rows in ROW_CLASSES:
        product = Product("gate", 6144, 1024)
        assert rule_shape(product, rows, ONE) in candidates(product, rows, ONE)


@pytest.mark.parametrize(
    "product, rows, splits, best",
    [
        (Product("split", 6144, 4096), 16, 1, (64, 16)),
        (Product("split", 6144, 4096), 192, 1, (64, 192)),
        (Product("split", 4096, 14336), 192, 2, (64, 192)),
        (Product("split", 4096, 14336), 512, 2, (128, 128)),
        (Product("gate", 28672, 4096), 16, 1, (128, 16)),
        (Product("gate", 28672, 4096), 128, 1, (64, 128)),
        (Product("whole", 4096, 12288), 256, 1, (64, 128)),
        (Product("whole", 32000, 4096), 128, 1, (128, 128)),
        (Product("whole", 3456, 10880), 160, 1, (64, 160)),  # 128: 1.75 times as long
        (Product("whole", 3456, 10880), 192, 1, (128, 64)),
    ],
)
def test_the_rule_finds_what_was_fastest_on_an_h200(product, rows, splits, best):
    assert rule_shape(product, rows, Order(splits, splits))[:2] == best


@pytest.mark.parametrize(
    "product, rows, splits, best",
    [
        (Product("split", 6144, 4096), 256, 1, (128, 128)),
        (Product("split", 4096, 14336), 384, 2, (128, 192)),
        (Product("split", 4096, 4096), 1024, 2, (128, 128)),
        (Product("gate", 28672, 4096), 192, 1, (128, 192)),
        (Product("gate", 28672, 4096), 1024, 1, (128, 128)),
    ],
)
def test_the_rule_finds_the_persistent_tiles_that_were_fastest(product, rows, splits, best):
    order = of_rows(Order(splits, splits), rows)
    shape = rule_shape(product, rows, order, has_wgmma=True)
    assert (shape[:2], shape.cuts != 0) == (best, True)


def test_the_last_turn_is_cut_where_it_is_short_of_tiles():
    shapes = [Shape(128, 128, 64, 4, 4, cuts) for cuts in (1, 2)]
    whole, cut = (clocks(Product("gate", 28672, 4096), 512, ONE, shape) for shape in shapes)
    assert cut < 0.95 * whole  # 448 tiles: three turns and 52
    whole, cut = (clocks(Product("gate", 256 * 132, 4096), 512, ONE, shape) for shape in shapes)
    assert cut == whole  # four turns


def test_tiles_are_cut_only_where_a_last_turn_is_short():
    def cuts(N: int, rows: int) -> set[int]:
        found = candidates(Product("gate", N, 4096), rows, ONE, has_wgmma=True)
        return {s.cuts for s in found if (s.block_n, s.block_m) == (128, 128) and s.cuts}

    assert cuts(28672, 512) == {1, 2, 4}
    assert cuts(256 * 132, 512) == {1}  # whole turns
    assert cuts(4096, 256) == {1}  # less than a turn
    assert cuts(28672, 4096) == {1}


def test_a_turn_that_is_nearly_empty_costs_a_whole_one():
    full, one_more = (Product("whole", 128 * tiles, 4096) for tiles in (264, 265))
    shape = Shape(128, 128, 64, 3, 4)
    assert clocks(one_more, 128, ONE, shape) > 1.3 * clocks(full, 128, ONE, shape)


def test_few_outputs_of_a_long_sum_are_in_parts():
    assert [rule_parts(N, 8192) for N in (1024, 2048, 4096, 6144, 28672)] == [4, 4, 2, 1, 1]
    assert [rule_parts(1024, K) for K in (1024, 2048, 4096)] == [1, 2, 4]


def test_blocks_fill_a_split_and_registers_hold_what_waits():
    product = Product("split", 2560, 9728)  # splits of 2,432
    order, serial = Order(4, 2), Order(4, 1)
    assert suits(product, Shape(64, 16, 128, 6, 4), order)
    assert not suits(product, Shape(64, 16, 256, 3, 4), order)
    assert suits(product, Shape(64, 16, 256, 3, 4), ONE)
    assert suits(product, Shape(128, 128, 64, 6, 4, 1), serial)  # three sums of 64 registers
    assert suits(product, Shape(128, 192, 64, 4, 4, 1), order)
    assert not suits(product, Shape(128, 192, 64, 4, 4, 1), serial)
    assert suits(product, Shape(192, 96, 64, 5, 4, 1), serial)
    assert not suits(product, Shape(192, 128, 64, 5, 4, 1), serial)


@pytest.mark.parametrize("kind, most", [("split", 256), ("gate", 128)])
def test_tiles_of_8_bits_have_rows_of_128_bytes_and_room_for_accumulators(kind, most):
    product = Product(kind, 4096, 4096, FP8)
    for rows in ROW_CLASSES:
        found = candidates(product, rows, ONE, has_wgmma=True)
        assert {s.block_k for s in found} == {128}
        assert all((s.block_m <= most) for s in found)
        assert any(s.cuts for s in found) == (rows >= 128)
    assert rows_at_once(FP8, 256) == (128, 128)  # two pieces, in the same accumulators
    shape = Shape(128, 256, 128, 3, 4, 1)
    assert sums_held(Product("split", 4096, 4096, FP8), shape) == 128 + 64
    problem = problem_of(product, 16, Shape(64, 16, 64, 6, 4))
    assert problem == f"block_k 64, 128 is needed for {FP8}"
    assert problem_of(product, 16, Shape(64, 48, 128, 6, 4)) is not None


def test_float32_keeps_one_set_of_tiles():
    product = Product("split", 4096, 4096, "float32")
    assert {rule_shape(product, rows, ONE) for rows in (64, 512)} == {Shape(64, 64, 32, 3, 4)}
