"""The zip archive that torch.save writes: where the bytes of each record lie, stored as they are.

torch.load(mmap=True) takes a storage's bytes from where its record begins, whatever is there: those
of a deflated record are noise, and a storage that claims more than its record goes on into the next
one. So records are checked first, and storages afterwards.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from weights.errors import shown

HEADER = 30  # bytes of a local header before the name
SIGNATURE = b"PK\x03\x04"


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
    for record, following in pairwise(records):
        _check_end(file, record, following.header, shown(following.name))
    for record in records[-1:]:
        _check_end(file, record, end, "the directory of the archive")
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


def _check_end(file: Path, record: Record, end: int, what: str) -> None:
    if record.stop > end:
        raise ValueError(f"{file}: {shown(record.name)} ends at byte {record.stop}, inside {what}")
