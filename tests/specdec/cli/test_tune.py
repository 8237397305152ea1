"""`specdec tune` on a GPU of ours: what it measures, skips, writes and prints."""

import json
from pathlib import Path

import pytest
import torch

import specdec.cli.tune as command
from specdec.cli.tune import resolve_pair
from specdec.kernels import tiles
from specdec.kernels.tables import Entry, read_table, user_table
from specdec.kernels.tile_shapes import ROW_CLASSES, Product, Shape
from specdec.models.products import products_of
from specdec.tune.search import Job
from tests.weights.published import save


def pair_products(*pair):
    return products_of(*resolve_pair(*pair))


class FakeClock:
    has_wgmma = True

    def __init__(self, device: object) -> None:
        assert device == torch.device("cuda", 0)

    def prepare(self, jobs) -> None:
        assert all(job.tiles is not None for job in jobs)

    def time(self, job: Job) -> float:
        return 7.0 if job.tiles is None else 10.0 - job.tiles.num_stages


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> Path:
    """A GPU without a shipped table, and the file of the user's own."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "gpu_name", lambda device: "GPU")
    monkeypatch.setattr(command, "GpuClock", FakeClock)
    user_table.cache_clear()
    yield tmp_path / "tiles.json"
    user_table.cache_clear()


def test_a_cpu_is_refused_in_one_line(run):
    code, out, err = run("tune", "demo")
    assert (code, out) == (2, "")
    assert err == "specdec: error: tune measures on an NVIDIA GPU, and torch sees none here\n"


def test_every_product_of_the_pair_is_measured_once(run, gpu):
    code, out, err = run("tune", "demo", "--draft", "demo", "--dtype", "bfloat16")
    products = pair_products("demo", "demo", "bfloat16")

    assert (code, err) == (0, "")
    entries = read_table(gpu)["GPU"]
    assert list(entries) == products
    assert all(set(entry.rows) == set(ROW_CLASSES) for entry in entries.values())
    assert out.count("cuBLAS") == 1
    assert out.count(str(products[0])) == len(ROW_CLASSES)
    assert f"{len(products)} products measured for GPU, in {gpu}" in out
    user_table.cache_clear()
    again = run("tune", "demo", "--draft", "demo", "--dtype", "bfloat16")[1]
    assert again == (
        f"0 products measured for GPU, in {gpu}; {len(products)} were known "
        "(--again measures them too)\n"
    )


def test_what_is_shipped_is_measured_only_on_demand(run, gpu, monkeypatch):
    qkv, o, *others = pair_products("demo", None, "bfloat16")
    rows = dict.fromkeys(ROW_CLASSES, Shape(64, 16, 64, 3, 4))
    shipped = {"GPU": {o: Entry(4, rows)}}
    monkeypatch.setattr(tiles, "shipped_table", lambda: shipped)
    run("tune", "demo", "--dtype", "bfloat16")
    assert list(read_table(gpu)["GPU"]) == [qkv, *others]

    out = run("tune", "demo", "--dtype", "bfloat16", "--again", "--json")[1]
    found = json.loads(out)
    assert (found["gpu"], found["file"]) == ("GPU", str(gpu))
    assert len(found["products"]) == 2 + len(others)
    assert read_table(gpu)["GPU"][o].parts == 4, "those of the shipped table"


def test_a_faulty_table_is_refused_and_stays(run, gpu):
    gpu.write_text("{")
    code, out, err = run("tune", "demo", "--dtype", "bfloat16")
    assert (code, out) == (2, "")
    assert err.startswith(f"specdec: error: {gpu}: not a valid table of tiles: ")
    assert err.endswith("correct the file, or delete it and run `specdec tune` again\n")
    assert gpu.read_text() == "{"


def test_other_dtypes_are_refused(run, gpu):
    code, _, err = run("tune", "demo", "--dtype", "float32")
    assert code == 2
    assert err == (
        "specdec: error: --dtype float32: tiles are measured for bfloat16 and float16 only\n"
    )


def test_the_products_of_an_eagle1_pair_have_its_fc():
    found = pair_products("demo", "demo/eagle1", "float16")
    assert Product("whole", 256, 512, "float16") in found


def test_experts_and_their_router_are_named_and_not_measured(run, gpu, tmp_path):
    save("qwen3_moe, a dense layer", tmp_path / "moe")
    code, out, _ = run("tune", str(tmp_path / "moe"), "--dtype", "bfloat16")
    assert code == 0
    *_, measured, by_rule = out.splitlines()
    # qkv_proj, o_proj, both products of the dense layer's MLP, and the head
    assert measured.startswith("5 products measured")
    assert by_rule == (
        "tiles of the router and of 12 experts of 48x24, 3 a row: by rule, nothing measures them"
    )
    out = run("tune", str(tmp_path / "moe"), "--dtype", "bfloat16", "--json")[1]
    assert json.loads(out)["experts_by_rule"] == "12 experts of 48x24, 3 a row"
