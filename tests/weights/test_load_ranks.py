"""Each rank of a target reads its part of every tensor, bit for bit, and little else."""

import dataclasses
import os

import pytest
import torch

from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import TARGETS, save
from tests.weights.ranks import expected_part
from tests.weights.tiny import BIASES, tiny_target, write_target
from weights import CheckpointError, Shard, load_target
from weights.arrange import arrange
from weights.demo import demo_directory
from weights.files import reader as reader_module
from weights.shapes import target_shapes

TINY = [f"{name}{tied}" for name in BIASES for tied in ("", ", tied")]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Write the checkpoint of a name once."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("target")
            if name in TARGETS:
                save(name, made[name])
            elif name == "gpt_oss":
                save(name, made[name], num_local_experts=8)
            elif name == "gpt_oss, MXFP4":
                packed = tmp_path_factory.mktemp("packed")
                write_both_forms(directory("gpt_oss"), packed, made[name])
                made[name] = packed
            else:
                model_type, _, tied = name.partition(", ")
                target = tiny_target(model_type, has_tied_head=bool(tied), dtype="bfloat16")
                write_target(made[name], target, num_shards=2)
        return made[name]

    return directory


@pytest.fixture
def num_read(monkeypatch):
    """List the bytes of every read from files."""
    counts = []
    read = os.preadv

    def counted(file, buffers, place):
        counts.append(read(file, buffers, place))
        return counts[-1]

    monkeypatch.setattr(reader_module.os, "preadv", counted)
    return counts


def load(directory, rank=0, size=1, **options):
    return load_target(directory, shard=Shard(rank, size), progress=False, **options)


def num_bytes(tensors):
    return sum(x.numel() * x.itemsize for x in tensors.values())


@pytest.mark.parametrize("size", [2, 4])  # 4: more ranks than kv heads
@pytest.mark.parametrize("name", [*TINY, *TARGETS, "gpt_oss", "gpt_oss, MXFP4"])
def test_ranks_hold_their_parts_bit_for_bit(directories, name, size):
    whole = load(directories(name))
    for rank in range(size):
        found = load(directories(name), rank, size)
        expected = expected_part(whole, Shard(rank, size))
        assert found.tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found.tensors[key], tensor), (rank, key)
        assert found.config == whole.config
        shapes = arrange(target_shapes(found.local)).shapes
        assert {key: tuple(x.shape) for key, x in found.tensors.items()} == shapes


def test_the_only_rank_loads_as_ever(directories):
    found = load(directories("llama"))
    assert found.local == found.config
    assert found.shard == Shard(0, 1)


# norms are on all ranks; on four, kv heads are copied
@pytest.mark.parametrize(("size", "more"), [(2, 1.002), (4, 1.08)])
def test_a_rank_reads_its_bytes_alone(size, more, num_read):
    whole = load(demo_directory("target"))
    read_whole = sum(num_read)
    assert read_whole == num_bytes(whole.tensors)
    for rank in range(size):
        num_read.clear()
        found = load(demo_directory("target"), rank, size)
        assert sum(num_read) == num_bytes(found.tensors)
        assert sum(num_read) < more * read_whole / size


@pytest.mark.parametrize("dtype", [None, torch.float32])  # as stored, and cast
def test_no_rank_holds_a_whole_tensor(dtype, num_read, monkeypatch):
    directory = demo_directory("target")
    shapes = target_shapes(load(directory).config)
    made, empty = [], torch.empty

    def counted(*shape, **options):
        made.append(empty(*shape, **options))
        return made[-1]

    num_read.clear()
    monkeypatch.setattr(torch, "empty", counted)
    found = load(directory, 1, 2, dtype=dtype)
    part = max(torch.Size(shape).numel() for shape in target_shapes(found.local).values())
    largest = max(torch.Size(shape).numel() for shape in shapes.values())
    assert part == largest / 2
    assert max(num_read) <= 2 * part
    held = {x.data_ptr() for x in found.tensors.values()}
    staged = [x.numel() for x in made if x.data_ptr() not in held]
    assert max(staged, default=0) <= (0 if dtype is None else part)


def test_a_tied_head_that_differs_on_one_rank_is_found_there(tmp_path):
    target = tiny_target("llama", has_tied_head=True)
    head = target.tensors["embed_tokens.weight"].clone()
    head[60] += 1
    tensors = target.tensors | {"lm_head.weight": head}
    write_target(tmp_path, dataclasses.replace(target, tensors=tensors))
    load(tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        load(tmp_path, 1, 2)
