"""The converter of .bin heads: nothing unpickled, nothing replaced, nothing half-done."""

import json
import os
import resource
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load_file

import weights.convert
from specdec.cli import main
from tests.weights.formats import FORMATS
from tests.weights.tiny import draft_tensors, eagle3_config, tiny_target
from weights import load_eagle
from weights.convert import convert


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.slow
def test_a_bin_head_loads_after_the_command_of_the_error(tmp_path):
    target = tiny_target()
    config = eagle3_config(target)
    FORMATS["eagle-3"].write(tmp_path, config, draft_tensors(config), target)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    command = [sys.executable, "-m", "specdec", "convert", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.safetensors" in done.stdout
    loaded = load_eagle(tmp_path, target, progress=False)
    assert all(
        torch.equal(tensor, loaded.tensors[name]) for name, tensor in draft_tensors(config).items()
    )


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


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(weights.convert, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        convert(tmp_path, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


@pytest.fixture
def full_disk():
    """No file can grow beyond 64 kB."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path, request, refusal):
    torch.save({"a": torch.ones(1 << 16)}, tmp_path / "pytorch_model.bin")
    request.getfixturevalue("full_disk")
    assert refusal(tmp_path).startswith(f"{tmp_path}/model.safetensors: not written: ")
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_what_is_not_a_state_dict_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \.bin file"):
        convert(tmp_path, progress=False)
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a plain dict of tensors"):
        convert(tmp_path, progress=False)


@pytest.fixture
def refusal(capsys):
    """refusal(directory): the error of the command, which writes nothing."""

    def run(directory) -> str:
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(directory)])
        text = capsys.readouterr().err.removeprefix("specdec: error: ").removesuffix("\n")
        assert all(line.isprintable() for line in text.split("\n"))
        assert not (directory / "model.safetensors").exists()
        return text

    return run


@pytest.mark.parametrize(
    "shard", ["../secret.bin", "{}/secret.bin", "sub/../../secret.bin", "..", ""]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path, refusal, shard):
    directory = tmp_path / "checkpoint"
    (directory / "sub").mkdir(parents=True)
    torch.save({"a": torch.ones(1)}, tmp_path / "secret.bin")
    index = {"weight_map": {"a": shard.format(tmp_path)}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "is not the name of a file in this directory" in refusal(directory)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", "5", '{"weight_map": []}', '{"weight_map": {"a": [1]}}', "[" * 10**5, "\xff"],
)
def test_an_index_of_another_shape_is_refused(tmp_path, refusal, text):
    (tmp_path / "pytorch_model.bin.index.json").write_text(text, encoding="latin-1")
    assert "pytorch_model.bin.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "other.bin"])
def test_a_fifo_is_not_waited_for(tmp_path, refusal, name):
    os.mkfifo(tmp_path / name)
    assert f"{name}: not a file, a regular file is needed" in refusal(tmp_path)


class Calls:
    """A pickle that calls os.system when it is read by a careless reader."""

    def __reduce__(self):
        return os.system, ("\x1b[2J",)


PICKLES = {
    "empty": b"",
    "text": b"hello\n",
    "a truncated archive": b"PK\x03\x04" + bytes(40),
    "a pickle that ends early": b"\x80\x02}q\x00",
    "an opcode of its own": b"\x80\x02\xff.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "a module of escapes": b"\x80\x02c\x1b[2Jos\nsystem\n.",
    "code": Calls(),
    "a number for a name": {5: torch.ones(1)},
    "the name of the metadata": {"__metadata__": torch.ones(1)},
    "no data": {"a": torch.ones(1, device="meta")},
    "a sparse tensor": {"a": torch.eye(3).to_sparse()},
    "a complex tensor": {"a": torch.ones(2, dtype=torch.complex128)},
    "one number as terabytes": {"a": torch.ones(1).expand(10**6, 10**6)},
    "a thousand times the same": {
        f"a{i}": tensor for tensor in [torch.ones(1000)] for i in range(1000)
    },
}


@pytest.mark.parametrize("attack", PICKLES)
def test_a_hostile_or_odd_pickle_is_one_line(tmp_path, refusal, attack):
    content, file = PICKLES[attack], tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    text = refusal(tmp_path)
    assert text.startswith(f"{file}: ")
    assert "\n" not in text


def test_names_of_tensors_are_escaped(tmp_path, refusal):
    for file in ("one.bin", "two.bin"):
        torch.save({"\x1b[2J": torch.ones(1)}, tmp_path / file)
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "\\x1b[2J is in an earlier file too" in refusal(tmp_path)


def test_a_link_where_the_result_would_be_is_left_alone(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ValueError, match="nothing written"):
        convert(tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").is_symlink()


PLAIN = {"a": torch.arange(100.0), "b": torch.arange(7) + 1000, "empty": torch.empty(0)}


def rewrite(file, compression=zipfile.ZIP_STORED, pickled=lambda text: text):
    """The archive of torch.save, its records written anew."""
    torch.save(PLAIN, file)
    with zipfile.ZipFile(file) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, pickled(content) if name.endswith("data.pkl") else content)


def directory_entry(content, name):
    """Where the entry of the name begins in the central directory of a zip archive."""
    return content.rindex(name, 0, content.rindex(b"PK\x05\x06")) - 46


def test_an_archive_whose_records_were_stored_anew_is_read(tmp_path):
    rewrite(tmp_path / "pytorch_model.bin")
    tensors = load_file(convert(tmp_path, progress=False))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in PLAIN.items())


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_compressed_records_are_refused(tmp_path, refusal, compression):
    rewrite(tmp_path / "pytorch_model.bin", compression)
    text = refusal(tmp_path)
    assert "/data.pkl is compressed: save it again with torch.save" in text


def test_one_compressed_record_is_refused(tmp_path, refusal):
    file = tmp_path / "pytorch_model.bin"
    rewrite(file)
    with zipfile.ZipFile(file) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content, 8 if name.endswith("data/1") else 0)
    assert "/data/1 is compressed" in refusal(tmp_path)


@pytest.mark.parametrize("count", [99, 112])
def test_a_storage_of_another_size_than_its_record_is_refused(tmp_path, refusal, count):
    file = tmp_path / "pytorch_model.bin"
    rewrite(file, pickled=lambda text: text.replace(b"K\x64", bytes([75, count])))
    text = refusal(tmp_path)
    assert "/data/0 has 400 bytes from byte" in text
    assert f"its storage claims {4 * count} from byte" in text


def test_a_record_that_no_storage_takes_is_refused(tmp_path, refusal):
    rewrite(tmp_path / "pytorch_model.bin")
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "a") as archive:
        archive.writestr("pytorch_model/data/9", b"more")
    assert "2 storages and 3 records of data" in refusal(tmp_path)


LIES = {  # field of an entry: first byte, bytes, value, words
    "a header beyond the file": (42, 4, 10**6, "/data/1 has no header at byte 1000000"),
    "a header inside data": (42, 4, 400, "/data/1 has no header at byte 400"),
    "a length into the next record": (20, 8, 200 << 32 | 200, "inside pytorch_model/data/2"),
    "encrypted": (8, 2, 1, "/data/1 is encrypted"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_directory_of_an_archive_that_lies_is_refused(tmp_path, refusal, lie):
    first, length, value, words = LIES[lie]
    file = tmp_path / "pytorch_model.bin"
    rewrite(file)
    content = bytearray(file.read_bytes())
    start = directory_entry(content, b"pytorch_model/data/1") + first
    content[start : start + length] = value.to_bytes(length, "little")
    file.write_bytes(content)
    text = refusal(tmp_path)
    assert words in text
    assert text.startswith(f"{file}: ")
