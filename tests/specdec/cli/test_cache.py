"""`specdec cache`: kernels go to a file and into another cache; without a GPU one line says so."""

from pathlib import Path

import pytest
import torch

import specdec
import specdec.cli.cache
from specdec.kernels.archive.header import Machine

NAME = "_add_kernel"
KEY = "A" * 52
METADATA = '{"triton_version": "3.7.1", "target": {"arch": 90}}'


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A machine with one compiled kernel; caches() makes its cache an empty one."""
    values = dict.fromkeys(("torch", "cuda", "python", "platform"), "1")
    machine = Machine(gpu="NVIDIA H200", capability="9.0", triton="3.7.1", **values)
    entry = tmp_path / "full" / KEY
    entry.mkdir(parents=True)
    (entry / f"{NAME}.json").write_text(METADATA)
    (entry / f"{NAME}.cubin").write_bytes(bytes(2_000_000))
    (entry / f"__grp__{NAME}.json").write_text("{}")
    directories = [tmp_path / "full"]
    monkeypatch.setattr(specdec.cli.cache, "this_machine", lambda: machine)
    monkeypatch.setattr(specdec.cli.cache, "cache_directory", lambda: directories[-1])
    return lambda: directories.append(tmp_path / "empty")


def test_kernels_are_exported_and_imported(run, caches, tmp_path):
    file = tmp_path / "kernels.tar.gz"
    first = f"{file}: 1 kernels, 0.0 MB\n"
    second = "for NVIDIA H200, Triton 3.7.1, torch 1\n"
    assert run("cache", "export", str(file)) == (0, first + second, "")
    caches()
    place = tmp_path / "empty"
    new = f"{place}: 1 added, 0 kept\n"
    assert run("cache", "import", str(file)) == (0, first + new, "")
    known = f"{place}: 0 added, 1 kept\n"
    assert run("cache", "import", str(file)) == (0, first + known, "")


def test_another_version_of_specdec_is_said(run, caches, tmp_path, monkeypatch):
    file = str(tmp_path / "kernels.tar.gz")
    run("cache", "export", file)
    monkeypatch.setattr(specdec, "__version__", "9.9")
    assert (
        "kernels that 9.9 changed are compiled at the next start\n"
        in run("cache", "import", file)[1]
    )


def test_an_empty_cache_is_one_line_that_says_what_to_do(run, caches, tmp_path):
    caches()
    code, out, err = run("cache", "export", str(tmp_path / "kernels.tar.gz"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "start an engine first" in err


@pytest.mark.parametrize("verb", ["export", "import"])
def test_without_a_gpu_one_line_says_that_it_is_needed(run, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "kernels.tar.gz"
    if verb == "import":
        file.write_text("")
    expected = "kernels are compiled for a GPU, and torch sees no CUDA device here\n"
    assert run("cache", verb, str(file)) == (2, "", f"specdec: error: {expected}")


def test_a_file_of_something_else_is_one_line(run, caches):
    code, out, err = run("cache", "import", str(Path(__file__)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "not a kernel archive" in err


def test_the_help_says_to_import_only_what_is_trusted(run):
    code, out, _ = run("cache", "import", "--help")
    assert (code, "import only what you trust" in " ".join(out.split())) == (0, True)
