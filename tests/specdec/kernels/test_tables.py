"""Tables of tiles: what is written reads back, and what is wrong is named, never skipped."""

import json
import os
from pathlib import Path

import pytest

from specdec.kernels.tables import (
    Entry,
    format_table,
    key_of,
    parse_table,
    read_table,
    shipped_table,
    user_file,
    write_table,
)
from specdec.kernels.tile_shapes import FP8, ROW_CLASSES, Product, Shape
from specdec.kernels.tiles import choose_order, fitting_rows

PRODUCT = Product("split", 4096, 4096)
TABLE = {
    "GPU 1": {
        PRODUCT: Entry(2, {16: Shape(64, 16, 256, 3, 4), 384: Shape(128, 96, 64, 4, 4)}),
        Product("whole", 32000, 4096, "float16"): Entry(1, {16: Shape(128, 16, 128, 3, 4)}),
        Product("split", 4096, 4096, FP8): Entry(2, {16: Shape(64, 16, 128, 16, 4)}),
    },
    "GPU 2": {Product("gate", 28672, 4096): Entry(1, {})},
}
KEY = key_of(PRODUCT)


def test_a_table_reads_back_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "tiles.json"
    write_table(file, TABLE)
    assert read_table(file) == TABLE
    assert [each.name for each in file.parent.iterdir()] == ["tiles.json"]


def test_a_write_that_fails_leaves_the_old_table_alone(tmp_path, monkeypatch):
    file = tmp_path / "tiles.json"
    write_table(file, {})

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_table(file, TABLE)
    assert read_table(file) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]


def test_a_product_takes_one_line():
    lines = format_table(TABLE).splitlines()
    assert sum('"rows"' in line for line in lines) == 4
    assert lines[2] == (
        ' "split,4096,4096,bfloat16": {"parts": 2, "rows": '
        '{"16": [64, 16, 256, 3, 4], "384": [128, 96, 64, 4, 4]}},'
    )


def test_no_file_is_an_empty_table(tmp_path):
    assert read_table(tmp_path / "none" / "tiles.json") == {}


def test_the_shipped_table_is_written_as_the_writer_writes_it():
    file = Path(__file__).parents[3] / "specdec" / "kernels" / "tuned.json"
    assert format_table(shipped_table()) == file.read_text()


def test_all_shipped_tiles_suit_the_order_of_their_sums():
    for gpu, entries in shipped_table().items():
        for product, entry in entries.items():
            order = choose_order(product, gpu)
            assert entry.parts == order.parts, key_of(product)
            assert fitting_rows(entry, product, order) == entry.rows, key_of(product)


def test_every_shipped_product_has_every_row_class():
    missing = {
        gpu: {
            key_of(product): rows
            for product, entry in entries.items()
            if (rows := set(ROW_CLASSES) ^ set(entry.rows))
        }
        for gpu, entries in shipped_table().items()
    }
    assert missing == {gpu: {} for gpu in shipped_table()}


@pytest.mark.parametrize(
    "key, entry, words",
    [
        ("split,4096,4096", {}, "split|whole|gate,N,K,bfloat16|float16"),
        ("split,4096,0,bfloat16", {"rows": {}}, "a name is"),
        ("split,4096,4096,float32", {"rows": {}}, "a name is"),
        ("sum,4096,4096,bfloat16", {"rows": {}}, "a name is"),
        (KEY, [], "[] is not an object"),
        (KEY, {}, "rows: null is not an object"),
        (KEY, {"rows": {}, "us": 1}, 'field "us"'),
        (KEY, {"rows": {}, "parts": 3}, "parts 3, allowed are 1, 2, 4"),
        (KEY, {"rows": {}, "splits": True}, "parts true"),
        ("whole,64,64,bfloat16", {"rows": {}, "parts": 2}, "parts 2, allowed are 1"),
        (KEY, {"rows": {"17": [64, 16, 64, 3, 4]}}, 'rows "17", the classes are 16, 32'),
        (KEY, {"rows": {"16": [64, 16, 64, 3]}}, "5 numbers are needed"),
        (KEY, {"rows": {"16": "fast"}}, '"fast" is no list of integers'),
        (KEY, {"rows": {"16": [64, 16, 64, 3, 4.0]}}, "no list of integers"),
        (KEY, {"rows": {"16": [64, 16, 64, 3, True]}}, "no list of integers"),
        (KEY, {"rows": {"16": [32, 16, 64, 3, 4]}}, "block_n 32, allowed are 64, 128, 192, 256"),
        (KEY, {"rows": {"16": [64, 24, 64, 3, 4]}}, "block_m 24"),
        (KEY, {"rows": {"16": [64, 16, 96, 3, 4]}}, "block_k 96"),
        (KEY, {"rows": {"16": [64, 16, 64, 99, 4]}}, "num_stages 99"),
        (KEY, {"rows": {"16": [64, 16, 64, 3, 2]}}, "num_warps 2, allowed are 4, 8"),
        (KEY, {"rows": {"16": [256, 256, 128, 4, 8]}}, "524,288 bytes of shared memory"),
        (KEY, {"rows": {"256": [128, 64, 64, 4, 4, 4]}}, "cuts 4 leaves 16 rows of block_m 64"),
        (KEY, {"rows": {"4096": [64, 96, 64, 3, 4]}}, "a power of two is needed"),
    ],
)
def test_what_is_wrong_is_named_with_the_file_and_what_to_do(tmp_path, key, entry, words):
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps({"GPU": {key: entry}}))
    with pytest.raises(ValueError, match="not a valid table of tiles") as error:
        read_table(file)
    message = str(error.value)
    assert words in message
    assert message.startswith(str(file))
    assert message.endswith("correct the file, or delete it and run `specdec tune` again")


def test_tiles_of_a_relay_are_left_out_with_one_line_of_the_log(tmp_path, caplog):
    """A table that an earlier version has written is taken, and written in today's words."""
    file = tmp_path / "tiles.json"
    relay, kept = [128, 128, 64, 6, 4, -1], [128, 128, 64, 6, 4, 2]
    rows = {"384": relay, "448": [128, 256, 64, 4, 4, -1], "512": kept}
    file.write_text(json.dumps({"GPU": {KEY: {"splits": 2, "rows": rows}}}))
    tables = [read_table(file) for _ in range(3)]
    assert tables == [{"GPU": {PRODUCT: Entry(2, {512: Shape(*kept)})}}] * 3
    [line] = caplog.messages
    assert line == (
        f"{file}: 2 tiles of a kernel that is gone (cuts -1) are left out, and others are chosen; "
        "`specdec tune` measures them"
    )
    write_table(file, tables[0])
    assert "-1" not in file.read_text()
    assert "splits" not in file.read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"GPU": 1}', "[" * 100_000])
def test_a_file_without_a_table_is_refused(text):
    with pytest.raises(ValueError, match=r"^here: not a valid table of tiles: .*; do this"):
        parse_table(text, "here", "do this")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "tiles.json").mkdir()
    with pytest.raises(ValueError, match=r"tiles.json: Is a directory; make it readable"):
        read_table(tmp_path / "tiles.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_table(tmp_path / "binary")


def test_the_users_file_is_in_the_cache_directory(monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert user_file() == Path("/own/tiles.json")
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    assert user_file() == Path("/xdg/specdec/tiles.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_file() == Path(os.path.expanduser("~/.cache/specdec/tiles.json"))
