"""Anything but a regular file is a CheckpointError that names it, and no read blocks."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.weights.tiny import tiny_target, write_target
from weights import CheckpointError, inspect_checkpoint, load_target
from weights.errors import Problems
from weights.files.guard import MAX_JSON_LEVELS, open_file, parse_object
from weights.files.header import read_header

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
FILES = ("config.json", "generation_config.json", "model.safetensors", INDEX, SHARD)
KINDS = {
    "dangling": lambda file: file.symlink_to("nowhere"),
    "looping": lambda file: file.symlink_to(file.name),
    "directory": lambda file: file.mkdir(),
    "FIFO": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "unreadable": lambda file: file.symlink_to("/proc/self/mem"),
}


@pytest.fixture(autouse=True)
def nothing_waits():
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < 20


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_target(directory, progress=False)
    return str(error.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_but_a_regular_file_is_refused_by_name(tmp_path, kind, name):
    write_target(tmp_path, tiny_target(), 1 if name == "model.safetensors" else 2)
    (tmp_path / name).unlink()
    KINDS[kind](tmp_path / name)
    assert f"\n  - {name}: " in refusal(tmp_path)


def test_inspect_reports_such_a_file_too(tmp_path):
    write_target(tmp_path, tiny_target())
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert inspect_checkpoint(tmp_path).problems == (
        "config.json: not a file, a regular file is needed",
    )


@pytest.mark.parametrize(
    "shard", ["x" * 5000, "a\0b", "\ud800", "", ".", "..", "../x", "/etc/passwd", "a/b"]
)
def test_an_index_may_name_files_of_its_directory_only(tmp_path, shard):
    write_target(tmp_path, tiny_target(), 2)
    values = json.loads((tmp_path / INDEX).read_text())
    values["weight_map"]["model.norm.weight"] = shard
    (tmp_path / INDEX).write_text(json.dumps(values))
    assert INDEX in refusal(tmp_path)


def test_a_path_too_long_for_the_system_is_refused():
    assert "no such directory" in refusal(Path("x" * 5000))


def test_a_link_to_a_regular_file_is_followed(tmp_path):
    write_target(tmp_path / "blobs", tiny_target(), 2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert load_target(tmp_path / "snapshot", progress=False).config.num_layers == 8
    shutil.rmtree(tmp_path / "blobs")
    assert "config.json" not in refusal(tmp_path / "snapshot")


@pytest.mark.parametrize("levels", [MAX_JSON_LEVELS + 1, 900, 10**5])
@pytest.mark.parametrize(
    "key", ["quantization_config", "rope_parameters", "eos_token_id", "architectures"]
)
def test_json_nested_too_deep_is_refused(tmp_path, key, levels):
    write_target(tmp_path, tiny_target())
    text = (tmp_path / "config.json").read_text()
    deep = "[" * levels + "]" * levels
    (tmp_path / "config.json").write_text(f'{text[:-1]}, "{key}": {{"a": {deep}}}}}')
    assert "config.json is n" in refusal(tmp_path)


def test_wrappers_in_wrappers_are_refused(tmp_path):
    write_target(tmp_path, tiny_target())
    levels = 400
    (tmp_path / "config.json").write_text('{"model": ' * levels + "{}" + "}" * levels)
    assert "config.json is nested more than 64 levels deep" in refusal(tmp_path)


def test_a_header_of_absurd_numbers_is_refused(tmp_path):
    far = 10**4299
    entries = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [far, far + 4]},
        "b": {"dtype": "F32", "shape": [2**62] * 50_000, "data_offsets": [0, 4]},
        "c": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
    }
    text = json.dumps(entries).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    problems, start = Problems(tmp_path), time.perf_counter()
    assert read_header(tmp_path / "x.safetensors", problems) == {}
    assert time.perf_counter() - start < 2
    assert len(problems.lines) == 3


def test_an_open_file_reads_what_is_in_it(tmp_path):
    (tmp_path / "a").write_bytes(b"{}")
    problems = Problems(tmp_path)
    stream = open_file(tmp_path / "a", problems)
    assert stream is not None
    with stream:
        assert parse_object(stream.read(), "a", problems) == {}
    assert problems.lines == []
