"""A rank reads its part of a tensor, and no byte beside it."""

import os

import pytest
import torch
from safetensors.torch import save_file

from weights import CheckpointError
from weights.files import reader as reader_module
from weights.files import transfer
from weights.files.part import Part
from weights.files.reader import Reader
from weights.files.transfer import CopyJob

SHAPE = (6, 5, 4)
PARTS = [Part(0, 2, 5), Part(0, 0, 6), Part(1, 1, 3), Part(1, 4, 5), Part(2, 0, 2), Part(2, 3, 4)]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def x(request):
    return torch.randn(SHAPE).to(request.param)


@pytest.fixture
def reader(tmp_path, x):
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "x": x}, tmp_path / "model.safetensors")
    return Reader(tmp_path)


@pytest.fixture
def num_read(monkeypatch):
    """Count the bytes that are read from files."""
    counts = []
    read = os.preadv

    def counted(file, buffers, place):
        counts.append(read(file, buffers, place))
        return counts[-1]

    monkeypatch.setattr(reader_module.os, "preadv", counted)
    return lambda: sum(counts)


def cut(x, part):
    return x.narrow(part.axis, part.start, part.stop - part.start).contiguous()


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_read_and_no_byte_more(reader, x, part, num_read):
    found = reader.read("x", part=part)
    assert torch.equal(found, cut(x, part))
    assert num_read() == found.numel() * found.itemsize


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_cast_in_its_place(reader, x, part):
    wanted = cut(x, part)
    out = torch.full((len(wanted) + 2, *wanted.shape[1:]), -9.0, dtype=torch.float64)
    reader.read_into("x", out[1:-1], part)
    assert torch.equal(out[1:-1], wanted.double())
    assert (out[[0, -1]] == -9).all()


@pytest.mark.parametrize("chunk", [1, 7, 64])  # bytes: within a run, over the end of one, of many
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_chunks_of_a_part_arrive_in_their_places(reader, x, part, chunk, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    found = torch.zeros_like(cut(x, part))
    job = CopyJob(reader, "x", 0, found.view(-1).view(torch.uint8), part)
    assert sum(transfer.copy_all([job], torch.device("cpu"))) == found.numel() * found.itemsize
    assert torch.equal(found, cut(x, part))


def test_a_file_that_ends_within_a_part_is_named(reader):
    entry = reader.entries["x"]
    with entry.file.open("r+b") as stream:
        stream.truncate(entry.stop - 1)
    assert reader.read("x", part=Part(2, 0, 3)).shape == (6, 5, 3)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: x has lost its end"):
        reader.read("x", part=Part(2, 1, 4))


def test_a_tensor_without_elements_has_parts(tmp_path):
    save_file({"x": torch.ones(0, 4)}, tmp_path / "model.safetensors")
    assert Reader(tmp_path).read("x", part=Part(1, 1, 3)).shape == (0, 2)
