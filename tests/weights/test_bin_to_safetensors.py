"""The converter of .bin heads: nothing unpickled, nothing replaced, nothing half-done."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from scripts import bin_to_safetensors
from scripts.bin_to_safetensors import convert
from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle3_config, tiny_target
from weights import load_eagle


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_a_bin_head_loads_after_the_command_of_the_error(tmp_path):
    target = tiny_target()
    config = eagle3_config(target)
    FORMATS["eagle-3"].write(tmp_path, config, draft_tensors(config), target)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    command = [sys.executable, "-m", "scripts.bin_to_safetensors", str(tmp_path), "--progress", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.safetensors" in done.stdout
    loaded = load_eagle(tmp_path, target, progress=False)
    assert all(torch.equal(tensor, loaded.tensors[name]) for name, tensor in draft_tensors(config).items())


def test_shards_and_shared_or_strided_tensors_come_out_whole(tmp_path):
    shared = torch.randn(4, 6)
    torch.save({"a": shared, "b": shared, "c": shared.t(), "d": shared[1:3]}, tmp_path / "one.bin")
    torch.save({"e": torch.arange(3)}, tmp_path / "two.bin")
    weight_map = {"a": "one.bin", "b": "one.bin", "c": "one.bin", "d": "one.bin", "e": "two.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tensors = load_file(convert(tmp_path, progress=False))
    assert torch.equal(tensors["b"], shared)
    assert torch.equal(tensors["c"], shared.t())
    assert torch.equal(tensors["d"], shared[1:3])
    assert torch.equal(tensors["e"], torch.arange(3))


def test_code_in_a_pickle_is_not_run(tmp_path, capfd):
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="weights_only"):
        convert(tmp_path, progress=False)
    assert "executed" not in capfd.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_an_existing_file_is_never_replaced(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match="nothing written"):
        convert(tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(bin_to_safetensors, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        convert(tmp_path, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_what_is_not_a_state_dict_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \.bin file"):
        convert(tmp_path, progress=False)
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a plain dict of tensors"):
        convert(tmp_path, progress=False)
