"""What a wheel and a source release hold: all that an installed specdec needs, and no more."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parent.parent
PACKAGES = ("specdec", "graphs", "weights")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built in a copy of the sources: building in the checkout would leave files there."""
    directory = tmp_path_factory.mktemp("wheel")
    return _built("wheel", _copy_of_the_sources(directory / "src"), directory)


def _built(kind: str, sources: Path, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    return next(directory.glob("specdec-*"))


def _files_of_packages() -> set[str]:
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    return {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}


def test_a_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == _files_of_packages()
    assert {"specdec/py.typed", "weights/demo/target/tokenizer.json"} <= packed


def test_what_an_error_says_to_install_needs_no_clone():
    """A wheel has neither constraints.txt nor a project in the current directory."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    allowed = {f'pip install "specdec[{name}]"' for name in (*extras, "{extra}")}
    sources = (file.read_text() for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    found = {command for text in sources for command in re.findall(r"pip install[^'\n]*", text)}
    assert found - allowed == set()
    assert len(found) >= 3


def test_the_version_has_one_source(wheel):
    assert wheel.name.startswith(f"specdec-{specdec.__version__}-")


@pytest.mark.slow
def test_the_sources_of_a_release_hold_what_a_clone_holds(tmp_path):
    sources = _built("sdist", _copy_of_the_sources(tmp_path / "src"), tmp_path)
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "constraints-cuda.txt"}
    wanted = _files_of_packages() | files
    assert wanted <= names
    assert {"tests/test_package.py", "scripts/check.sh", "benchmarks/README.md"} <= names


def _copy_of_the_sources(directory: Path) -> Path:
    for folder in (*PACKAGES, "tests", "scripts", "benchmarks"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, directory / folder, ignore=ignore)
    for file in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
        "constraints-cuda.txt",
    ):
        shutil.copy(ROOT / file, directory)
    return directory


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_pair(tmp_path, wheel):
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
    command = [
        tmp_path / "venv/bin/specdec",
        "generate",
        "demo",
        "def f(",
        "--draft",
        "demo",
        "--max-tokens",
        "8",
    ]
    done = subprocess.run(
        [*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    result = json.loads(done.stdout)
    assert len(result["token_ids"]) == 8
    assert result["target"].startswith(str(tmp_path))
