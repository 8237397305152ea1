"""Which tiles a product takes: the user's, the shipped, the rule's; its order never the user's."""

import json

import pytest
import torch

from specdec.kernels import tiles
from specdec.kernels.sum_order import Order
from specdec.kernels.tables import Entry, key_of, user_table
from specdec.kernels.tile_rule import rule_parts, rule_shape
from specdec.kernels.tile_shapes import MANY_ROWS, ROW_CLASSES, Product, Shape, problem_of
from specdec.kernels.tiles import Tiles, choose_tiles, source_of, tiles_for_columns

SHIPPED = Product("split", 4096, 4096)
OTHER = Product("split", 2048, 4096)
TWO = Order(4, 2)  # of both
SHAPES = [Shape(64, 16, 256, 3, 4), Shape(128, 16, 128, 4, 8)]


@pytest.fixture
def own_table(monkeypatch):
    """own_table(entries): the user's table of "GPU" beside a shipped one for SHIPPED."""

    def give(entries: dict[Product, Entry]) -> None:
        shipped = {SHIPPED: Entry(2, {16: SHAPES[0], 32: SHAPES[0]})}
        monkeypatch.setattr(tiles, "user_table", lambda: {"GPU": entries})
        monkeypatch.setattr(tiles, "shipped_table", lambda: {"GPU": shipped})
        choose_tiles.cache_clear()

    yield give
    choose_tiles.cache_clear()


def chosen(product: Product, rows: int, gpu: str = "GPU") -> Tiles:
    return choose_tiles(product.kind, rows, product.N, product.K, torch.bfloat16, gpu)


def shape_of(found: Tiles) -> Shape:
    return Shape(*(getattr(found, name) for name in Shape._fields))


def test_the_users_rows_come_before_the_shipped_and_these_before_the_rule(own_table):
    own_table({SHIPPED: Entry(2, {16: SHAPES[1]})})
    assert shape_of(chosen(SHIPPED, 16)) == SHAPES[1]
    assert shape_of(chosen(SHIPPED, 32)) == SHAPES[0]
    assert shape_of(chosen(SHIPPED, 64)) == rule_shape(SHIPPED, 64, TWO)
    assert shape_of(chosen(SHIPPED, 16, "another")) == rule_shape(SHIPPED, 16, TWO)


def test_a_users_relay_gives_way_to_the_rule(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    line = {"splits": 1, "rows": {"384": [128, 128, 64, 6, 4, -1], "16": list(SHAPES[1])}}
    (tmp_path / "tiles.json").write_text(json.dumps({"GPU": {key_of(SHIPPED): line}}))
    for cached in (user_table, choose_tiles):
        cached.cache_clear()
    try:
        assert shape_of(chosen(SHIPPED, 16)) == SHAPES[1]
        assert shape_of(chosen(SHIPPED, 384)) == rule_shape(SHIPPED, 384, TWO)
    finally:
        for cached in (user_table, choose_tiles):
            cached.cache_clear()


def test_a_source_has_tiles_for_every_class_of_rows(own_table):
    whole = Entry(2, dict.fromkeys(ROW_CLASSES, SHAPES[0]))
    own_table({OTHER: whole, SHIPPED: Entry(2, {16: SHAPES[1]})})
    assert [source_of(p, "GPU") for p in (SHIPPED, OTHER)] == ["rule", "user"]


def test_a_gpu_without_warp_groups_takes_no_persistent_tiles(own_table):
    persistent = Shape(128, 128, 64, 4, 4, 1)
    own_table({OTHER: Entry(1, {512: persistent})})
    found = chosen(OTHER, 512)
    assert (found.cuts, shape_of(found)) == (0, rule_shape(OTHER, 512, Order(4, 4)))
    names = (OTHER.kind, 512, OTHER.N, OTHER.K, torch.bfloat16, "GPU")
    assert shape_of(choose_tiles(*names, has_wgmma=True)) == persistent


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_users_table_never_decides_the_parts(own_table, parts):
    own_table({p: Entry(parts, {16: SHAPES[1], 4096: SHAPES[1]}) for p in (SHIPPED, OTHER)})
    for rows in (16, 32):
        assert (chosen(SHIPPED, rows).splits, chosen(SHIPPED, rows).parts) == (4, 2)
        assert chosen(OTHER, rows).parts == rule_parts(OTHER.N, OTHER.K) == 4
    assert (chosen(OTHER, MANY_ROWS).splits, chosen(OTHER, MANY_ROWS).parts) == (4, 1)


def test_tiles_that_do_not_suit_the_order_give_way(own_table):
    """As those that were measured for another one: a program's sums must fit into registers."""
    large, fitting = Shape(128, 256, 64, 4, 4, 1), Shape(128, 128, 64, 4, 4, 1)
    own_table({SHIPPED: Entry(2, dict.fromkeys(ROW_CLASSES, large))})
    found = choose_tiles("split", 512, 4096, 4096, torch.bfloat16, "GPU", has_wgmma=True)
    assert shape_of(found) == rule_shape(SHIPPED, 512, TWO, has_wgmma=True)
    assert source_of(SHIPPED, "GPU") == "rule"
    own_table({SHIPPED: Entry(2, dict.fromkeys(ROW_CLASSES, fitting))})
    assert source_of(SHIPPED, "GPU") == "user"


def test_only_unfinished_products_are_split(own_table):
    own_table({})
    assert chosen(Product("whole", 4096, 4096), 16).splits == 1
    assert chosen(Product("gate", 4096, 4096), 16).splits == 1


def test_many_rows_walk_their_splits_in_one_program(own_table):
    own_table({})
    assert [chosen(OTHER, rows).is_serial for rows in (512, MANY_ROWS)] == [False, True]


@pytest.mark.parametrize("rows", [rows for rows in ROW_CLASSES if rows > 128])
def test_a_part_of_the_columns_has_tiles_of_its_own_and_the_splits_of_all(rows):
    device = torch.device("meta")
    x, weight = (torch.empty(n, 8192, dtype=torch.bfloat16, device=device) for n in (rows, 6144))
    whole = choose_tiles("split", rows, *weight.shape, x.dtype, "NVIDIA H200", True)
    found = tiles_for_columns(whole, x, weight[4096:])
    assert (found.cuts, found.is_serial) == (0, whole.is_serial)
    assert (found.splits, found.parts) == (whole.splits, whole.parts)
    assert (whole.splits, whole.parts) == (4, 1 if whole.is_serial else 2)
    assert problem_of(Product("split", 2048, 8192), rows, shape_of(found)) is None
    num_programs = 2048 // found.block_n * -(-rows // found.block_m)
    assert num_programs * (1 if found.is_serial else 2) > 32  # of 132 multiprocessors
