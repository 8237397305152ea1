"""Write the compiled kernels of Triton's cache to an archive."""

import os
import tarfile
from collections.abc import Collection, Sequence
from io import BytesIO
from pathlib import Path

from specdec.kernels.archive import header
from specdec.kernels.archive.entries import Entry, entries
from specdec.kernels.archive.header import Machine, header_of


def export_kernels(cache: Path, kernels: Collection[str], machine: Machine, out: Path) -> int:
    """The number of kernels in `out`, which appears whole or not at all.

    kernels: names of the functions. ValueError where none of them is compiled, `out` exists, or
    its directory does not.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} already exists; nothing written")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a directory; nothing written")
    found = list(entries(cache, kernels, machine))
    count = sum(entry.is_kernel for entry in found)
    if count == 0:
        raise ValueError(
            f"{cache} has no kernels for this GPU and Triton {machine.triton}: start an engine "
            "first, with the models and options that will be used"
        )
    head = header_of(machine, count, sum(len(entry.files) for entry in found))
    partial = out.with_name(f"{out.name}.{os.getpid()}")
    try:
        with tarfile.open(partial, "x:gz", compresslevel=6) as archive:
            _write(archive, head.to_json(), found)
        os.replace(partial, out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return count


def _write(archive: tarfile.TarFile, head: bytes, found: Sequence[Entry]) -> None:
    _add(archive, header.NAME, head)
    for entry in found:
        for file in entry.files:
            _add(archive, f"{entry.key}/{file.name}", file.read_bytes())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Without the times, owners and modes of this machine's files."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, BytesIO(content))
