"""Install an archive's kernels into Triton's cache.

Nothing is written before the header says that they run here. Then all of it goes to a temporary
directory inside the cache, and only when the whole archive has been read do entries move to their
places, each by one rename. Complete entries that are there already are kept; a kernel's that lacks
its group file is completed, the group file last.
"""

import gzip
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from pathlib import Path

from specdec.kernels.archive import header
from specdec.kernels.archive.entries import EXTENSIONS, GROUP, KERNEL_FILE, KEY, write_group
from specdec.kernels.archive.header import Header, Machine, parse_header, refuse_other_machines

MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 4 << 30  # of all files, unpacked, and of what follows them
BLOCK = 4096  # bytes that the smallest file takes
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Kernels that are new in the cache, those that were there, and the specdec that exported."""

    num_added: int
    num_kept: int
    version: str


def import_kernels(file: Path, cache: Path, machine: Machine) -> Imported:
    """ValueError for an archive that is damaged, holds anything else, or is for other machines."""
    with _reading(file) as archive:
        head = _read_header(archive)
        refuse_other_machines(head.machine, machine)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="import.") as name:
            unpacked = Path(name)
            num_files = _unpack(archive, unpacked)
            if num_files != head.num_files:
                raise ValueError(f"it is damaged: {num_files} of {head.num_files} files")
            num_kernels = _complete(unpacked, cache.absolute())
            num_added = _move(unpacked, cache)
    return Imported(num_added=num_added, num_kept=num_kernels - num_added, version=head.specdec)


@contextmanager
def _reading(file: Path) -> Iterator[tarfile.TarFile]:
    """Every error of the body names the file."""
    try:
        with _Stream(file) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            yield archive
    except (
        tarfile.TarError,
        zlib.error,
        gzip.BadGzipFile,
        EOFError,
        RecursionError,  # of tarfile, by thousands of headers in a row
    ) as error:
        raise ValueError(f"{file}: not a kernel archive, or a damaged one: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}; nothing imported") from error


class _Stream(gzip.GzipFile):
    """Gives no more at once than one file may have, whatever sizes the archive claims."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MAX_FILE_BYTES:
            raise ValueError(f"not a kernel archive: it claims a part of {size} bytes")
        return super().read(size)


def _read_header(archive: tarfile.TarFile) -> Header:
    member = archive.next()
    if member is None or member.name != header.NAME or not _is_plain(member, header.MAX_BYTES):
        raise ValueError(f"not a kernel archive: it does not begin with {header.NAME}")
    return parse_header(_content(archive, member))


def _unpack(archive: tarfile.TarFile, directory: Path) -> int:
    """How many files there are."""
    num_bytes = num_files = 0
    while (member := archive.next()) is not None:
        key, file = _place(member)
        num_files += 1
        num_bytes += max(member.size, BLOCK)
        _refuse_more_than_allowed(num_bytes)
        path = directory / key / file
        if path.exists():
            raise ValueError(f"{member.name} appears twice")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_content(archive, member))
    stream = archive.fileobj
    while stream is not None and (rest := stream.read(CHUNK)):  # up to the checksum
        num_bytes += len(rest)
        _refuse_more_than_allowed(num_bytes)
    return num_files


def _refuse_more_than_allowed(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_BYTES >> 30} GiB")


def _place(member: tarfile.TarInfo) -> tuple[str, str]:
    """Entry and name of a file; ValueError for all that no export writes."""
    key, _, file = member.name.partition("/")
    is_known = file in EXTENSIONS or KERNEL_FILE.fullmatch(file) is not None
    if not KEY.fullmatch(key) or not is_known or not _is_plain(member, MAX_FILE_BYTES):
        raise ValueError(f"{member.name[:200]!r} is not a kernel file")
    return key, file


def _is_plain(member: tarfile.TarInfo, max_bytes: int) -> bool:
    is_file = member.type == tarfile.REGTYPE and not member.issparse()
    return is_file and 0 <= member.size <= max_bytes


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None, member.name
    return stream.read()


def _complete(directory: Path, cache: Path) -> int:
    """Give each kernel its group file; how many there are. An entry has one kernel or extension."""
    count = 0
    for entry in directory.iterdir():
        files = {file.name for file in entry.iterdir()}
        name = min(files).rpartition(".")[0]
        if files == {f"{name}.cubin", f"{name}.json"}:
            write_group(entry, name, cache / entry.name)
            count += 1
        elif len(files) != 1 or not files <= set(EXTENSIONS):
            raise ValueError(f"the entry {entry.name} has {', '.join(sorted(files))} only")
    return count


def _move(directory: Path, cache: Path) -> int:
    """How many kernels are new."""
    num_added = 0
    for entry in sorted(directory.iterdir()):
        place = cache / entry.name
        is_kernel = len(list(entry.iterdir())) > 1
        is_added = _rename(entry, place) or (is_kernel and _fill(entry, place))
        num_added += is_added and is_kernel
    return num_added


def _rename(entry: Path, place: Path) -> bool:
    """Whether the place was free; a directory that Triton has only looked into is."""
    try:
        os.rename(entry, place)
    except OSError as error:
        if error.errno in (EEXIST, ENOTEMPTY):
            return False
        raise
    return True


def _fill(entry: Path, place: Path) -> bool:
    """Whether the place lacked the group file, as after an interrupted compilation."""
    if any(place.glob(GROUP.format("*"))):
        return False
    prefix = GROUP.partition("{}")[0]
    for file in sorted(entry.iterdir(), key=lambda file: file.name.startswith(prefix)):
        os.replace(file, place / file.name)
    return True
