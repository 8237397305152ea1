"""A made-up machine, and caches as Triton leaves them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.kernels.archive.entries import EXTENSIONS
from specdec.kernels.archive.export import export_kernels
from specdec.kernels.archive.header import Machine

KERNELS = {"_add_kernel", "_write_kernel"}


@pytest.fixture
def machine() -> Machine:
    return Machine(
        gpu="NVIDIA H200",
        capability="9.0",
        torch="2.11.0+cu130",
        triton="3.7.1",
        cuda="13.0",
        python="cpython-311-x86_64-linux-gnu",
        platform="Linux x86_64",
    )


@pytest.fixture
def key() -> Callable[[str], str]:
    """key("A"): the name of an entry."""
    return lambda letter: letter * 52


@pytest.fixture
def add_kernel(key) -> Callable[..., Path]:
    """add_kernel(cache, "A", "_add_kernel"): an entry as Triton writes it."""

    def add(cache: Path, letter: str, name: str, triton: str = "3.7.1", arch: int = 90) -> Path:
        entry = cache / key(letter)
        entry.mkdir(parents=True)
        target = {"backend": "cuda", "arch": arch, "warp_size": 32}
        metadata = {"name": name, "target": target, "triton_version": triton}
        (entry / f"{name}.json").write_text(json.dumps(metadata))
        for kind in ("source", "ttir", "ttgir", "llir", "ptx", "cubin"):
            (entry / f"{name}.{kind}").write_bytes(f"{letter} {kind}".encode() * 300)
        paths = {file.name: str(file) for file in entry.iterdir()}
        (entry / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))
        return entry

    return add


@pytest.fixture
def cache(tmp_path, add_kernel, key) -> Path:
    """Two kernels of ours, an extension, and what is none of ours."""
    cache = tmp_path / "exporting"
    add_kernel(cache, "A", "_add_kernel")
    add_kernel(cache, "B", "_write_kernel")
    add_kernel(cache, "C", "_kernel_of_others")
    add_kernel(cache, "D", "_add_kernel", triton="3.6.0")
    add_kernel(cache, "E", "_add_kernel", arch=100)
    interrupted = add_kernel(cache, "F", "_add_kernel")
    (interrupted / "__grp___add_kernel.json").unlink()
    (cache / key("G")).mkdir()
    (cache / key("G") / EXTENSIONS[0]).write_bytes(b"\x7fELF")
    (cache / key("H")).mkdir()  # a look-up without a result
    (cache / "notes.txt").write_text("of the user")
    return cache


@pytest.fixture
def archive(cache, machine, tmp_path) -> Path:
    """The export of that cache."""
    file = tmp_path / "kernels.tar.gz"
    export_kernels(cache, KERNELS, machine, file)
    return file
