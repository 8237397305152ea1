"""The log says where tiles come from, on a GPU."""

import logging
from pathlib import Path

import pytest
import torch

from specdec.kernels import tiles
from specdec.kernels.tables import Entry
from specdec.kernels.tile_shapes import ROW_CLASSES, Product, Shape
from specdec.start import device
from specdec.start.device import log_tiles, sources_line

PRODUCTS = [Product("split", 4096, K) for K in (1024, 2048, 4096)]
PRODUCTS.append(Product("whole", 32000, 4096))


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    known = Entry(1, dict.fromkeys(ROW_CLASSES, Shape(64, 16, 64, 3, 4)))
    monkeypatch.setattr(tiles, "shipped_table", lambda: {"H": dict.fromkeys(PRODUCTS[:2], known)})
    monkeypatch.setattr(tiles, "user_table", lambda: {"H": dict.fromkeys(PRODUCTS[1:3], known)})
    monkeypatch.setattr(device, "user_file", lambda: Path.home() / "own" / "tiles.json")


def test_every_source_is_counted_and_what_follows_the_rule_is_named():
    assert sources_line(PRODUCTS, "H") == (
        "tiles of 4 products: 1 shipped for H, 2 from ~/own/tiles.json, "
        "1 by rule (whole 32000x4096); `specdec tune` measures them"
    )


def test_tuning_is_named_only_where_it_helps():
    assert sources_line(PRODUCTS[:1], "H") == "tiles of 1 products: 1 shipped for H"
    wide = [Product("split", 64, 64, "float32")]
    assert sources_line(wide, "H") == "tiles of 1 products: 1 by rule (split 64x64)"


def test_a_cpu_has_no_tiles(caplog):
    with caplog.at_level(logging.INFO, "specdec"):
        log_tiles(PRODUCTS, "8 experts", torch.device("cpu"))
    assert caplog.messages == []


def test_experts_are_named_on_a_line_of_their_own(caplog, monkeypatch):
    monkeypatch.setattr(device, "gpu_name", lambda device: "H")
    with caplog.at_level(logging.INFO, "specdec"):
        log_tiles(PRODUCTS, "8 experts of 64x32, 2 a row", torch.device("cuda"))
        log_tiles(PRODUCTS, None, torch.device("cuda"))
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "tiles of 4 products",
        "tiles of the router and of 8 experts of 64x32, 2 a row",
        "tiles of 4 products",
    ]
