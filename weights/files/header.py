"""The header of one safetensors file, checked before a byte of data is touched.

Layout (huggingface/safetensors, README "Format"): 8 bytes little-endian length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data; offsets count from the end of the
header. The file is untrusted: tensors must lie inside it, apart, in the size of dtype and shape.
"""

import math
import os
import reprlib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch

from weights.errors import Problems
from weights.files.guard import MAX_JSON_BYTES, open_file, parse_object

MAX_COUNT = 1 << 63  # of bytes and of rows
MAX_RANK = 64  # torch's limit

# the header's word -> torch's
FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
CODE_DTYPES = {"F8_E4M3": "float8_e4m3fn"}  # of numbers that have scales
INTEGER_DTYPES = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in (FLOAT_DTYPES | CODE_DTYPES | INTEGER_DTYPES | {"BOOL": "bool"}).items()
}
DTYPE_BITS = {
    **{name: 8 * dtype.itemsize for name, dtype in TORCH_DTYPES.items()},
    **dict.fromkeys(("F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "U32": 32, "U64": 64, "C64": 64},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` to `stop` of `file`. dtype as in the header, "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def where(self) -> str:
        return f"{self.file.name}: {self.name}"


def read_header(file: Path, problems: Problems) -> dict[str, TensorEntry]:
    """The valid entries of one file by name; what is wrong goes to `problems`."""
    stream = open_file(file, problems)
    if stream is None:
        return {}
    with stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            values, data_start = _read_json(stream, file, size, problems)
        except OSError as error:
            problems.add(f"{file.name}: the header cannot be read: {error.strerror}")
            return {}
    values.pop("__metadata__", None)
    entries = (_entry(file, name, value, data_start, problems) for name, value in values.items())
    valid = [entry for entry in entries if entry is not None and _is_inside(entry, size, problems)]
    _check_overlap(valid, problems)
    spare = size - data_start - sum(entry.num_bytes for entry in valid)
    if len(valid) == len(values) and spare > 0:
        problems.add(f"{file.name}: {spare} bytes of data belong to no tensor")
    return {entry.name: entry for entry in valid}


def _read_json(
    stream: BinaryIO, file: Path, size: int, problems: Problems
) -> tuple[dict[str, object], int]:
    """The header's object and where the data starts."""
    if size < 8:
        line = f"{size} bytes, shorter than the 8-byte length of a safetensors header"
        problems.add(f"{file.name}: {line}")
        return {}, 8
    length = int.from_bytes(stream.read(8), "little")
    claim = f"{file.name}: the header claims {length} bytes"
    if length > size - 8:
        problems.add(f"{claim}, the file has {size - 8} after its length")
        return {}, 8
    if length > MAX_JSON_BYTES:
        problems.add(f"{claim}, more than the limit of {MAX_JSON_BYTES}")
        return {}, 8
    repeated: list[str] = []

    def to_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return values

    values = parse_object(stream.read(length), f"{file.name}: the header", problems, hook=to_dict)
    for key in repeated:
        problems.add(f"{file.name}: {key} occurs twice in the header")
    return values or {}, 8 + length


def _entry(
    file: Path, name: str, value: object, data_start: int, problems: Problems
) -> TensorEntry | None:
    where = f"{file.name}: {name}"
    fields = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    shape = _counts(fields.get("shape"))
    offsets = _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        needed = "its entry needs dtype, shape and two data_offsets"
        problems.add(f"{where}: {needed}, it is {reprlib.repr(value)}")
        return None
    if dtype not in DTYPE_BITS:
        problems.add(f"{where}: unknown dtype {dtype!r}")
        return None
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        problems.add(f"{where}: data_offsets {begin}..{end} do not hold {dtype} {list(shape)}")
        return None
    start, stop = data_start + begin, data_start + end
    return TensorEntry(name=name, dtype=dtype, shape=shape, file=file, start=start, stop=stop)


def _counts(value: object) -> tuple[int, ...] | None:
    """At most MAX_RANK integers >= 0, else None (True is not a count)."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        return None
    are_counts = all(type(item) is int and 0 <= item < MAX_COUNT for item in value)
    return tuple(value) if are_counts else None


def _is_inside(entry: TensorEntry, size: int, problems: Problems) -> bool:
    if entry.stop > size:
        what = f"ends at byte {entry.stop}, the file has {size}: truncated or a false header"
        problems.add(f"{entry.where} {what}")
    return entry.stop <= size


def _check_overlap(entries: list[TensorEntry], problems: Problems) -> None:
    filled = [entry for entry in entries if entry.num_bytes]
    ordered = sorted(filled, key=lambda entry: (entry.start, entry.stop))
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            problems.add(
                f"{after.where} starts at byte {after.start}, inside {before.name} "
                f"({before.start}..{before.stop}): overlapping data_offsets"
            )
