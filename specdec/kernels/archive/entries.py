"""Entries of Triton's cache: a directory each, named after a hash of all that was compiled.

A kernel's entry has its metadata and its binary (intermediate code too, which no launch needs), and
a group file with the absolute paths of the others. It is written last: an entry without it is
incomplete. An extension's entry is one shared library.
"""

import json
import re
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from specdec.kernels import triton
from specdec.kernels.archive.header import Machine

KEY = re.compile("[A-Z2-7]{52}")  # a SHA-256 in base 32
KERNEL_FILE = re.compile(r"([A-Za-z_]\w{0,149})\.(cubin|json)", re.ASCII)
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
# Triton's driver, and in its versions before 3.7 a launcher for each kind of signature
EXTENSIONS = (f"cuda_utils{SUFFIX}", f"__triton_launcher{SUFFIX}")
GROUP = "__grp__{}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """key: its directory's name. files: what loading it takes, without the group file."""

    key: str
    files: tuple[Path, ...]
    is_kernel: bool


def cache_directory() -> Path:
    """Where Triton keeps what it compiled, TRITON_CACHE_DIR for one."""
    return Path(triton.knobs.cache.dir)


def entries(cache: Path, kernels: Collection[str], machine: Machine) -> Iterator[Entry]:
    """Those of the kernels with these names, compiled for this machine, and all extensions."""
    for directory in sorted(cache.iterdir()) if cache.is_dir() else ():
        if KEY.fullmatch(directory.name) and directory.is_dir():
            yield from _kernel(directory, kernels, machine)
            yield from _extension(directory)


def write_group(directory: Path, name: str, home: Path) -> None:
    """Complete a kernel's entry, which will be at `home`."""
    paths = {file: str(home / file) for file in (f"{name}.cubin", f"{name}.json")}
    (directory / GROUP.format(name)).write_text(json.dumps({"child_paths": paths}))


def _kernel(directory: Path, kernels: Collection[str], machine: Machine) -> Iterator[Entry]:
    for group in directory.glob(GROUP.format("*")):
        name = group.name.removeprefix("__grp__").removesuffix(".json")
        files = (directory / f"{name}.cubin", directory / f"{name}.json")
        is_whole = all(file.is_file() for file in files)
        if name in kernels and is_whole and _is_for(machine, files[1]):
            yield Entry(key=directory.name, files=files, is_kernel=True)


def _extension(directory: Path) -> Iterator[Entry]:
    for name in EXTENSIONS:
        if (directory / name).is_file():
            yield Entry(key=directory.name, files=(directory / name,), is_kernel=False)


def _is_for(machine: Machine, metadata: Path) -> bool:
    try:
        values = json.loads(metadata.read_text())
        major, minor = divmod(values["target"]["arch"], 10)
        version = values["triton_version"]
    except (ValueError, KeyError, TypeError):
        return False  # an AMD GPU's, or damaged
    return version == machine.triton and f"{major}.{minor}" in machine.capability.split(" and ")
