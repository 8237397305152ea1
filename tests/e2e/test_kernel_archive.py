"""Kernels of one cache, exported and imported into an empty one: a start compiles nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

START = ("generate", "demo", "def f(", "--draft", "demo", "--max-tokens", "4", "--device", "cuda")


@pytest.fixture
def specdec(tmp_path) -> Callable[..., str]:
    """specdec("old", ...): the output of a command in a fresh process with this cache."""

    def call(cache: str, *args: str) -> str:
        command = [sys.executable, "-m", "specdec", *args]
        env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def built(cache: Path) -> set[str]:
    """What a compiler has written: kernels, and C extensions."""
    return {
        str(file.relative_to(cache))
        for kind in ("cubin", "so")
        for file in cache.rglob(f"*.{kind}")
    }


def test_a_start_with_imported_kernels_compiles_none(specdec, tmp_path):
    expected = specdec("old", *START)
    old = built(tmp_path / "old")
    num_kernels = sum(name.endswith(".cubin") for name in old)
    assert num_kernels > 50

    exported = specdec("old", "cache", "export", str(tmp_path / "file.tar.gz"))
    assert f": {num_kernels:,} kernels, " in exported
    imported = specdec("new", "cache", "import", str(tmp_path / "file.tar.gz"))
    assert f": {num_kernels:,} added, 0 kept" in imported
    assert built(tmp_path / "new") == old

    assert specdec("new", *START) == expected
    assert built(tmp_path / "new") == old
