"""Turn pytorch_model.bin (or shards with an index) into model.safetensors; runs no pickled code.

    specdec convert path/to/EAGLE3-LLaMA3.1-Instruct-8B

torch.load(weights_only=True, mmap=True) reads the tensors. It takes a storage's bytes from where
its record of the zip archive begins, whatever is there: those of a deflated record are noise, and a
storage that claims more than its record goes on into the next one. So records are checked first,
and storages afterwards. Tensors that share memory are written once each. An existing
model.safetensors is never replaced, and a new one appears whole or not at all.
"""

import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.types import Storage

from weights.bars import bar
from weights.errors import Problems, shown
from weights.files.guard import is_file_name, is_there, open_file
from weights.files.header import TORCH_DTYPES
from weights.files.reader import read_weight_map

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
RESULT = "model.safetensors"

DTYPES = {*TORCH_DTYPES.values(), torch.float8_e4m3fn, torch.float8_e5m2}
HEADER = 30  # bytes of a zip record's header before the name
SIGNATURE = b"PK\x03\x04"
MOST_COPIES = 16  # times the file's size for its tensors: a view of one number can claim terabytes


def convert(directory: Path, progress: bool = True) -> Path:
    """Write `directory`/model.safetensors from its .bin files and return its path.

    progress: show a bar, where there is a screen.
    """
    result = directory / RESULT
    if is_there(result) or is_there(directory / f"{RESULT}.index.json"):
        raise ValueError(f"{directory}: safetensors are there already, nothing written")
    tensors: dict[str, Tensor] = {}
    for file in bar(bin_files(directory), desc="reading", unit="file", is_wanted=progress):
        for name, tensor in read_bin(file):
            if name in tensors:
                raise ValueError(f"{file}: {shown(name)} is in an earlier file too")
            tensors[name] = tensor
    write_whole(tensors, result)
    return result


def bin_files(directory: Path) -> list[Path]:
    """The files to read: those of the index, else pytorch_model.bin, else the only .bin."""
    if is_there(directory / INDEX):
        return _indexed(directory)
    if is_there(directory / SINGLE):
        return [directory / SINGLE]
    files = sorted(directory.glob("*.bin"))
    if len(files) != 1:
        found = shown(str([file.name for file in files])) if files else "no .bin file"
        raise ValueError(f"{directory}: needs {SINGLE} or {INDEX}, has {found}")
    return files


def _indexed(directory: Path) -> list[Path]:
    problems = Problems(directory)
    names = sorted(set(read_weight_map(directory / INDEX, problems).values()))
    for name in names:
        if not is_file_name(name):
            problems.add(f"{INDEX}: {name!r} is not the name of a file in this directory")
    problems.raise_if_any()
    return [directory / name for name in names]


def read_bin(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of one state dict, each with memory of its own."""
    problems = Problems(file.parent)
    stream = open_file(file, problems)
    problems.raise_if_any()
    assert stream is not None, "no stream without a problem"
    with stream:
        most = MOST_COPIES * os.fstat(stream.fileno()).st_size
        records = read_records(stream, file)
    state, storages = _unpickled(file)
    check_storages(file, records, storages)
    if not isinstance(state, dict) or not all(isinstance(each, Tensor) for each in state.values()):
        raise ValueError(f"{file}: not a plain dict of tensors")
    for name, tensor in state.items():
        _check(file, name, tensor)
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    if size > most:
        line = f"tensors of {size} bytes in all, more than {MOST_COPIES} times the file"
        raise ValueError(f"{file}: {line}")
    for name, tensor in state.items():
        yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def _unpickled(file: Path) -> tuple[object, list[tuple[int, int]]]:
    """What is in it, and the address and bytes of each storage in the map of the file."""
    storages: list[tuple[int, int]] = []

    def stay(storage: Storage, _: str) -> Storage:
        storages.append((storage.data_ptr(), storage.nbytes()))
        return storage

    try:
        return torch.load(file, map_location=stay, weights_only=True, mmap=True), storages
    except Exception as error:  # of any kind: an untrusted pickle can make the unpickler raise it
        text = shown(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 300)
        line = f"{file}: not read by torch.load(weights_only=True, mmap=True): {text}"
        raise ValueError(line) from error


def _check(file: Path, name: object, tensor: Tensor) -> None:
    """ValueError for what model.safetensors cannot hold."""
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(f"{file}: {shown(repr(name))} cannot be the name of a tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        what = f"{shown(name)} is {tensor.layout}, {tensor.device}, {tensor.dtype}"
        raise ValueError(f"{file}: {what}: a dense tensor with data, of a plain dtype, is needed")


def write_whole(tensors: dict[str, Tensor], result: Path) -> None:
    """Write next to the result, then rename: a crash leaves no partial file.

    OSError if that fails: safetensors has an error of its own, for a full disk too.
    """
    part = result.with_name(f"{result.name}.part-{os.getpid()}")
    try:
        part.touch()  # with the mode of other new files, which save_file would not give it
        mode = part.stat().st_mode
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(mode)
        part.rename(result)
    except SafetensorError as error:
        raise OSError(f"{result}: not written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The file's bytes from `start` to `stop`. header: where the one of the record begins."""

    name: str
    header: int
    start: int
    stop: int


def read_records(stream: BinaryIO, file: Path) -> list[Record]:
    """All records, as they lie; [] if it is no zip archive. ValueError for any that torch misreads.

    file: for errors
    """
    try:
        if not zipfile.is_zipfile(stream):
            return []
        with zipfile.ZipFile(stream) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except Exception as error:  # of any kind: untrusted bytes can make zipfile raise it
        text = shown(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{file}: no zip archive that can be read: {text}") from error
    records = [_record(stream, file, info) for info in infos]
    records.sort(key=lambda record: record.header)
    following = [(each.header, shown(each.name)) for each in records[1:]]
    following.append((end, "the directory of the archive"))
    for record, (begins, what) in zip(records, following, strict=False):
        if record.stop > begins:
            line = f"{shown(record.name)} ends at byte {record.stop}, inside {what}"
            raise ValueError(f"{file}: {line}")
    return records


def check_storages(
    file: Path, records: Sequence[Record], storages: Sequence[tuple[int, int]]
) -> None:
    """Each record of data must be one storage, whole. ValueError if any is not.

    storages: address and bytes of each, in one map of the file, wherever that begins
    """
    held = sorted((each.start, each.stop - each.start, each.name) for each in records)
    held = [each for each in held if each[1] and each[2].partition("/")[2].startswith("data/")]
    found = sorted({each for each in storages if each[1]})
    if len(found) != len(held):
        raise ValueError(f"{file}: {len(found)} storages and {len(held)} records of data")
    for (start, size, name), (address, num_bytes) in zip(held, found, strict=True):
        offset = address - found[0][0] + held[0][0]
        if (offset, num_bytes) != (start, size):
            claim = f"its storage claims {num_bytes} from byte {offset} on"
            raise ValueError(
                f"{file}: {shown(name)} has {size} bytes from byte {start} on, {claim}"
            )


def _record(stream: BinaryIO, file: Path, info: zipfile.ZipInfo) -> Record:
    where = f"{file}: {shown(info.filename)}"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        needed = "save it again with torch.save, which stores records as they are"
        raise ValueError(f"{where} is compressed: {needed}")
    if info.flag_bits & 1:
        raise ValueError(f"{where} is encrypted")
    header = b""
    if info.header_offset >= 0:
        stream.seek(info.header_offset)
        header = stream.read(HEADER)
    if len(header) < HEADER or not header.startswith(SIGNATURE):
        raise ValueError(f"{where} has no header at byte {info.header_offset}")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + HEADER + lengths
    stop = start + info.file_size
    return Record(name=info.filename, header=info.header_offset, start=start, stop=stop)
