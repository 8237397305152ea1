"""An archive has our kernels for this machine and what loading them takes, or it does not exist."""

import errno
import json
import re
import tarfile
from dataclasses import replace

import pytest

from specdec.kernels.archive import export
from specdec.kernels.archive.entries import EXTENSIONS
from specdec.kernels.archive.export import export_kernels

NAMES = {"_add_kernel", "_write_kernel"}


def test_an_archive_has_our_whole_kernels_for_this_gpu_and_triton_and_all_extensions(archive, key):
    with tarfile.open(archive) as file:
        assert file.getnames() == [
            "header.json",
            f"{key('A')}/_add_kernel.cubin",
            f"{key('A')}/_add_kernel.json",
            f"{key('B')}/_write_kernel.cubin",
            f"{key('B')}/_write_kernel.json",
            f"{key('G')}/{EXTENSIONS[0]}",
        ]


def test_the_header_says_what_the_kernels_are_for(archive, machine):
    with tarfile.open(archive) as file:
        header = json.load(file.extractfile("header.json"))
    assert (header["format"], header["num_kernels"]) == (1, 2)
    assert header["num_files"] == 5
    assert header["machine"]["gpu"] == machine.gpu
    assert header["machine"].keys() == set(machine.__slots__)


@pytest.mark.parametrize("is_there", [True, False])
def test_without_kernels_nothing_is_written(tmp_path, machine, is_there):
    cache = tmp_path / "cache"
    if is_there:
        cache.mkdir()
    with pytest.raises(ValueError, match=r"no kernels for this GPU and Triton 3.7.1: start an eng"):
        export_kernels(cache, NAMES, machine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_kernels_of_another_machine_do_not_count(cache, tmp_path, machine):
    other = replace(machine, capability="8.0 and 8.9")
    with pytest.raises(ValueError, match="no kernels for this GPU"):
        export_kernels(cache, NAMES, other, tmp_path / "out")
    both = replace(machine, capability="10.0 and 9.0")
    assert export_kernels(cache, NAMES, both, tmp_path / "out") == 3


def test_a_file_that_exists_is_not_replaced(cache, archive, machine):
    before = archive.read_bytes()
    with pytest.raises(ValueError, match=r"kernels\.tar\.gz already exists; nothing written"):
        export_kernels(cache, NAMES, machine, archive)
    assert archive.read_bytes() == before


def test_a_directory_that_is_missing_is_named(cache, machine, tmp_path):
    words = rf"^{re.escape(str(tmp_path / 'none'))} is not a directory; nothing written$"
    with pytest.raises(ValueError, match=words):
        export_kernels(cache, NAMES, machine, tmp_path / "none" / "out")


def test_a_write_that_fails_leaves_nothing(cache, machine, tmp_path, monkeypatch):
    real = export._add

    def add(archive, name, content):
        if name.endswith("_write_kernel.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(archive, name, content)

    monkeypatch.setattr(export, "_add", add)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        export_kernels(cache, NAMES, machine, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
