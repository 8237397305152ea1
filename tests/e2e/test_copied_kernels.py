"""Copied to another machine, Triton's cache spares a start all compiling: see docs/offline.md."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

START = ("generate", "demo", "def f(", "--draft", "demo", "--max-tokens", "4", "--device", "cuda")


def start(cache: Path) -> str:
    """Run a command in a fresh process with this cache; returns what it prints."""
    env = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "specdec", *START]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(cache: Path) -> dict[str, int]:
    """When a compiler has written what is there: kernels, and C extensions."""
    files = (file for kind in ("cubin", "so") for file in cache.rglob(f"*.{kind}"))
    return {str(file.relative_to(cache)): file.stat().st_mtime_ns for file in files}


def test_a_start_with_a_copied_cache_compiles_none(tmp_path):
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    expected = start(cache)
    before = built(cache)
    assert sum(name.endswith(".cubin") for name in before) > 50
    cache.rename(elsewhere)
    shutil.copytree(elsewhere, cache)
    assert start(cache) == expected
    assert built(cache) == before
