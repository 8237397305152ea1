"""A wheel holds the bundled pair and the command, so that specdec works without a checkout."""

import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _is_data(package: str, name: str) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"][package]
    directory = ROOT / package
    return any(directory / name in directory.glob(pattern) for pattern in patterns)


@pytest.mark.parametrize("part", ["target", "eagle3", "eagle1"])
def test_every_file_of_the_demo_pair_is_package_data(part):
    files = [
        path.relative_to(ROOT / "weights").as_posix()
        for path in (ROOT / "weights/demo" / part).iterdir()
    ]

    assert "demo/" + part + "/config.json" in files
    assert [name for name in files if not _is_data("weights", name)] == []


@pytest.mark.parametrize("package", ["specdec", "graphs", "weights"])
def test_types_are_shipped(package):
    assert (ROOT / package / "py.typed").exists()
    assert _is_data(package, "py.typed")


def _copy_of_the_sources(directory: Path) -> Path:
    """Building in the checkout would leave a build/ there."""
    for package in ("specdec", "graphs", "weights"):
        shutil.copytree(
            ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, directory)
    return directory


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_pair(tmp_path):
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", tmp_path, _copy_of_the_sources(tmp_path / "src")],
        check=True,
    )
    wheel = next(tmp_path.glob("specdec-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    # the environment of this test has torch already: see it, but not this checkout
    venv.create(tmp_path / "venv", system_site_packages=True, with_pip=True)
    python = tmp_path / "venv/bin/python"
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    subprocess.run(
        [python, "-m", "pip", "-q", "install", "--no-deps", "--force-reinstall", wheel], check=True
    )
    specdec = tmp_path / "venv/bin/specdec"
    options = ["--draft", "demo", "--max-tokens", "8", "--json"]
    command = [specdec, "generate", "demo", "def f(", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    result = json.loads(done.stdout)
    assert {"weights/demo/target/tokenizer.json", "weights/demo/eagle1/model.safetensors"} <= set(
        names
    )
    assert len(result["token_ids"]) == 8
    assert result["target"].startswith(str(tmp_path))
