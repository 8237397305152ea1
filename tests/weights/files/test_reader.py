"""A directory as a table of tensors: every dtype, shards, a false index, no safetensors."""

import errno
import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from weights import CheckpointError
from weights.files.reader import Reader

INDEX = "model.safetensors.index.json"


def write_shards(directory, shards, weight_map=None):
    for shard, tensors in shards.items():
        save_file(tensors, directory / shard)
    weight_map = weight_map or {
        name: shard for shard, tensors in shards.items() for name in tensors
    }
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as error:
        Reader(directory)
    return str(error.value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (5, 7)])
def test_tensors_come_back_bit_for_bit(tmp_path, dtype, shape):
    wanted = {"odd": torch.ones(3, dtype=torch.uint8), "x": (torch.randn(shape) * 3).to(dtype)}
    save_file(wanted, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    for name, tensor in wanted.items():
        assert reader.read(name).dtype == tensor.dtype
        assert torch.equal(reader.read(name), tensor)


def test_a_tensor_owns_its_memory(tmp_path):
    save_file({"x": torch.ones(4)}, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    reader.read("x").zero_()
    assert torch.equal(reader.read("x"), torch.ones(4))


def test_several_threads_may_read_at_once(tmp_path):
    wanted = {f"t{i}": torch.randn(50, 50) for i in range(8)}
    save_file(wanted, tmp_path / "model.safetensors")
    reader, found = Reader(tmp_path), {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: reader.read(name)}))
        for name in wanted
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_shards_are_one_table(tmp_path):
    write_shards(
        tmp_path,
        {"one.safetensors": {"a": torch.ones(1)}, "two.safetensors": {"b": torch.zeros(2)}},
    )
    reader = Reader(tmp_path)
    assert {name: entry.file.name for name, entry in reader.entries.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert torch.equal(reader.read("b"), torch.zeros(2))


def test_an_index_that_lies_is_one_error_with_every_lie(tmp_path):
    shards = {
        "one.safetensors": {"a": torch.ones(1)},
        "two.safetensors": {"b": torch.ones(1), "c": torch.ones(1)},
    }
    lies = {
        "a": "two.safetensors",
        "b": "two.safetensors",
        "x": "one.safetensors",
        "y": "gone.safetensors",
    }
    write_shards(tmp_path, shards, lies)
    text = refusal(tmp_path)
    assert "gone.safetensors: named by model.safetensors.index.json, missing" in text
    assert "x is said to be in one.safetensors, which does not hold it" in text
    assert "a is said to be in two.safetensors" in text
    assert "two.safetensors: c is not where model.safetensors.index.json says (nowhere)" in text


@pytest.mark.parametrize("shard", ["../up.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, shard):
    write_shards(tmp_path, {"one.safetensors": {"a": torch.ones(1)}}, {"a": shard})
    assert "is not the name of a file in this directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_an_index_of_another_shape_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def test_the_error_for_a_bin_only_directory_names_the_command(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    text = refusal(tmp_path)
    assert f"specdec convert {tmp_path}" in text
    assert "pytorch_model.bin" in text


def test_a_lone_file_of_another_name_is_read_and_several_are_not(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "head.safetensors")
    assert list(Reader(tmp_path).entries) == ["a"]
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    assert "head.safetensors, other.safetensors" in refusal(tmp_path)


def test_a_directory_with_nothing_to_read_is_refused(tmp_path):
    assert "neither model.safetensors nor" in refusal(tmp_path)
    assert "no such directory" in refusal(tmp_path / "nowhere")


def test_a_tensor_of_another_dtype_is_refused_by_name_when_read(tmp_path):
    save_file({"x": torch.ones(2).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="x is F8_E5M2, not supported"):
        Reader(tmp_path).read("x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_into_fills_its_place_and_nothing_else_and_casts(tmp_path, dtype):
    wanted = torch.randn(3, 5)
    save_file(
        {"odd": torch.ones(3, dtype=torch.uint8), "x": wanted}, tmp_path / "model.safetensors"
    )
    out = torch.full((5, 5), -9.0, dtype=dtype)
    Reader(tmp_path).read_into("x", out[1:4])
    assert torch.equal(out[1:4], wanted.to(dtype))
    assert (out[[0, 4]] == -9).all()


def test_a_disk_that_fails_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("weights.files.reader.os.preadv", fail)
    words = r"model\.safetensors: a cannot be read: Input/output"
    with pytest.raises(CheckpointError, match=words):
        reader.read("a")
