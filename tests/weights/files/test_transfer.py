"""Chunks through buffers in turn: every byte arrives in its place, and failures are reported."""

import pytest
import torch
from safetensors.torch import save_file

from weights import CheckpointError, Shard, load_target
from weights.demo import demo_directory
from weights.files import transfer
from weights.files.reader import Reader
from weights.files.transfer import CopyJob

CPU = torch.device("cpu")


@pytest.fixture
def reader(tmp_path):
    torch.manual_seed(0)
    sizes = {"odd": 3, "short": 63, "full": 64, "long": 1000, "empty": 0}
    save_file(
        {name: torch.randint(256, (n,)).to(torch.uint8) for name, n in sizes.items()},
        tmp_path / "model.safetensors",
    )
    return Reader(tmp_path)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", 64)
    monkeypatch.setattr(transfer, "BUFFERS", 3)


def test_every_byte_arrives_in_its_place(reader):
    names = [name for name, entry in reader.entries.items() if entry.num_bytes]
    found = {
        name: torch.full((reader.entries[name].shape[0] + 2,), 99, dtype=torch.uint8)
        for name in names
    }
    jobs = [CopyJob(reader, name, 0, found[name][1:-1]) for name in names]
    assert sum(transfer.copy_all(jobs, CPU)) == 3 + 63 + 64 + 1000
    for name in names:
        assert torch.equal(found[name][1:-1], reader.read(name))
        assert found[name][[0, -1]].tolist() == [99, 99]


def test_a_file_truncated_after_opening_is_named(reader):
    entry = reader.entries["long"]
    with entry.file.open("r+b") as stream:
        stream.truncate(max(each.stop for each in reader.entries.values()) - 5)
    last = max(reader.entries.values(), key=lambda each: each.stop).name
    job = CopyJob(reader, last, 0, torch.empty(reader.entries[last].shape, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=f"model.safetensors: {last} has lost its end"):
        list(transfer.copy_all([job], CPU))


@pytest.mark.gpu
def test_a_gpu_gets_the_bytes_of_the_file(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    expected = load_target(demo_directory("target"), progress=False).tensors
    found = load_target(demo_directory("target"), device="cuda", progress=False).tensors
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_gets_the_bytes_of_a_ranks_part(monkeypatch, rank):
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    options = {"shard": Shard(rank, 2), "progress": False}
    expected = load_target(demo_directory("target"), **options).tensors
    found = load_target(demo_directory("target"), device="cuda", **options).tensors
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
