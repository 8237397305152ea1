"""Attacks on a safetensors header: each is one CheckpointError that names file and key."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weights import CheckpointError
from weights.files.reader import Reader

DATA = bytes(range(16))
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def write(directory: Path, header: object, data: bytes = DATA, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (directory / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)


ATTACKS = {
    "truncated": (
        {"a": A, "b": B},
        DATA[:12],
        None,
        ["model.safetensors: b ends at byte", "truncated"],
    ),
    "header longer than the file": ({"a": A}, b"", 10**6, ["the header claims 1000000 bytes"]),
    "header of 2^64 bytes": ({"a": A}, b"", 2**64 - 1, ["the header claims"]),
    "overlapping": (
        {"a": A, "b": B | {"data_offsets": [4, 12]}},
        DATA[:12],
        None,
        ["b starts at byte", "overlapping"],
    ),
    "same bytes twice": ({"a": A, "b": A}, DATA[:8], None, ["overlapping"]),
    "wrong size": (
        {"a": A | {"shape": [3]}},
        DATA[:8],
        None,
        ["a: data_offsets 0..8 do not hold F32 [3]"],
    ),
    "negative size": (
        {"a": A | {"data_offsets": [8, 0]}},
        DATA[:8],
        None,
        ["a: data_offsets 8..0"],
    ),
    "negative offset": (
        {"a": A | {"data_offsets": [-8, 0]}},
        DATA[:8],
        None,
        ["a: its entry needs"],
    ),
    "true as a number": ({"a": A | {"shape": [True, 2]}}, DATA[:8], None, ["a: its entry needs"]),
    "huge shape": ({"a": A | {"shape": [2**62, 2**62]}}, DATA[:8], None, ["do not hold"]),
    "unknown dtype": ({"a": A | {"dtype": "F7"}}, DATA[:8], None, ["a: unknown dtype 'F7'"]),
    "no dtype": (
        {"a": {"shape": [2], "data_offsets": [0, 8]}},
        DATA[:8],
        None,
        ["a: its entry needs"],
    ),
    "not an object": ([A], DATA[:8], None, ["the header is a JSON list"]),
    "not JSON": (b"{", DATA, None, ["the header is not JSON"]),
    "a number of 5000 digits": (
        b'{"a": ' + b"9" * 5000 + b"}",
        DATA,
        None,
        ["the header is not JSON"],
    ),
    "not text": (b"\xff\xfe{}", DATA, None, ["the header is not JSON"]),
    "deeply nested": (b"[" * 10**5, DATA, None, ["model.safetensors"]),
    "a key twice": (
        b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(A).encode() + b"}",
        DATA[:8],
        None,
        ["a occurs twice"],
    ),
    "bytes of no tensor": ({"a": A}, DATA, None, ["8 bytes of data belong to no tensor"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_false_header_is_refused_by_name(tmp_path, attack):
    header, data, length, words = ATTACKS[attack]
    write(tmp_path, header, data, length)
    with pytest.raises(CheckpointError) as error:
        Reader(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_a_header_without_a_byte_after_it_is_whole(tmp_path):
    write(tmp_path, {"a": A | {"shape": [0], "data_offsets": [0, 0]}}, b"")
    assert Reader(tmp_path).entries["a"].num_bytes == 0


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_shorter_than_its_length_is_refused(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="shorter than the 8-byte length"):
        Reader(tmp_path)


def test_all_faults_of_a_header_come_in_one_error(tmp_path):
    write(tmp_path, {"a": A | {"dtype": "F7"}, "b": B | {"shape": [9]}, "c": A, "d": A})
    with pytest.raises(CheckpointError) as error:
        Reader(tmp_path)
    assert len(error.value.problems) == 3


def test_every_byte_cut_off_is_noticed(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").mkdir()
    for size in range(len(whole)):
        (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            Reader(tmp_path / "cut")
