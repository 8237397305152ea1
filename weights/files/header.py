"""The header of one safetensors file, checked before a byte of data is touched.

Layout (huggingface/safetensors, README "Format"): 8 bytes little-endian length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data; offsets count from the end of the header. Tensors
must lie inside the file, must not overlap and must have the size that dtype and shape say. A file comes from a
stranger.
"""

import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch

from weights.errors import Problems
from weights.files.guard import MAX_JSON_BYTES, open_file, parse_object

MAX_COUNT = 1 << 63  # of bytes and of rows
MAX_RANK = 64  # what torch takes

DTYPE_BITS = {
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}

FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
INTEGER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
TORCH_DTYPES = {**FLOAT_DTYPES, **INTEGER_DTYPES, "BOOL": torch.bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` to `stop` of `file`. dtype is the header's word, "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path, problems: Problems) -> dict[str, TensorEntry]:
    """All tensors of one file by name; what is wrong goes to `problems`, and only sound entries are returned."""
    stream = open_file(file, problems)
    if stream is None:
        return {}
    with stream:
        size = os.fstat(stream.fileno()).st_size
        values, data_start = _read_json(stream, file, size, problems)
    entries = [
        _entry(file, name, value, data_start, problems)
        for name, value in values.items()
        if name != "__metadata__"
    ]
    sound = [entry for entry in entries if entry is not None and _is_inside(entry, size, problems)]
    _check_overlap(sound, problems)
    if len(sound) == len(entries):
        _check_coverage(file, sound, data_start, size, problems)
    return {entry.name: entry for entry in sound}


def _read_json(
    stream: BinaryIO, file: Path, size: int, problems: Problems
) -> tuple[Mapping[str, object], int]:
    if size < 8:
        problems.add(
            f"{file.name}: {size} bytes, shorter than the 8-byte length of a safetensors header"
        )
        return {}, 8
    length = int.from_bytes(stream.read(8), "little")
    if length > size - 8:
        problems.add(
            f"{file.name}: the header claims {length} bytes, the file has {size - 8} after its length"
        )
        return {}, 8
    if length > MAX_JSON_BYTES:
        problems.add(
            f"{file.name}: the header claims {length} bytes, more than the limit of {MAX_JSON_BYTES}"
        )
        return {}, 8
    repeated: list[str] = []
    values = parse_object(
        stream.read(length),
        f"{file.name}: the header",
        problems,
        hook=lambda pairs: _unique(pairs, repeated),
    )
    for key in repeated:
        problems.add(f"{file.name}: {key} occurs twice in the header")
    return values or {}, 8 + length


def _unique(pairs: list[tuple[str, object]], repeated: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            repeated.append(key)
        values[key] = value
    return values


def _entry(
    file: Path, name: str, value: object, data_start: int, problems: Problems
) -> TensorEntry | None:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (
        fields.get("dtype"),
        _counts(fields.get("shape")),
        _counts(fields.get("data_offsets")),
    )
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        problems.add(
            f"{file.name}: {name}: its entry needs dtype, shape and two data_offsets, it is {reprlib.repr(value)}"
        )
        return None
    if dtype not in DTYPE_BITS:
        problems.add(f"{file.name}: {name}: unknown dtype {dtype!r}")
        return None
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        problems.add(
            f"{file.name}: {name}: data_offsets {begin}..{end} do not hold {dtype} {list(shape)}"
        )
        return None
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        file=file,
        start=data_start + begin,
        stop=data_start + end,
    )


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of as many integers >= 0 as a tensor may have axes, else None (True is not a count)."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        return None
    if all(type(item) is int and 0 <= item < MAX_COUNT for item in value):
        return tuple(value)
    return None


def _is_inside(entry: TensorEntry, size: int, problems: Problems) -> bool:
    if entry.stop <= size:
        return True
    file = entry.file.name
    problems.add(
        f"{file}: {entry.name} ends at byte {entry.stop}, the file has {size}: truncated or a false header"
    )
    return False


def _check_overlap(entries: list[TensorEntry], problems: Problems) -> None:
    ordered = sorted(
        (entry for entry in entries if entry.num_bytes), key=lambda entry: (entry.start, entry.stop)
    )
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            problems.add(
                f"{after.file.name}: {after.name} starts at byte {after.start}, inside {before.name} "
                f"({before.start}..{before.stop}): overlapping data_offsets"
            )


def _check_coverage(
    file: Path, entries: list[TensorEntry], data_start: int, size: int, problems: Problems
) -> None:
    held = sum(entry.num_bytes for entry in entries)
    if held < size - data_start:
        problems.add(f"{file.name}: {size - data_start - held} bytes of data belong to no tensor")
