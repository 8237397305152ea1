"""`specdec env`: versions and machine, for a bug report. Imports nothing large, reads no secret."""

import json
import os
import platform
import runpy
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import specdec
from specdec.cli.choices import EnvOptions

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"),
    *("typer", "llguidance", "starlette", "uvicorn", "ray"),
)
VARIABLES = (
    *("SPECDEC_LOG", "SPECDEC_DEBUG", "SPECDEC_CACHE_DIR", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRITON_INTERPRET"),
)
QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version")
SECONDS = 10.0  # that nvidia-smi may take


def run_env(options: EnvOptions) -> None:
    """Print a line for each fact, or one JSON object."""
    found = facts()
    if options.json:
        print(json.dumps(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        print(f"{name:<{width}}{value if isinstance(value, str) else _counted(value)}")


def facts() -> dict[str, str | list[str]]:
    """GPU: a list of them, or why none was found."""
    cards, driver = _gpus()
    found: dict[str, str | list[str]] = {
        "specdec": specdec.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        **{name: _version(name) for name in PACKAGES},
        "CUDA": _cuda(),
        "driver": driver,
        "GPU": cards,
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "OS": f"{_distribution()}, {platform.platform()}",
    }
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    """What torch was built with, from its own file: to import torch would take seconds."""
    spec = find_spec("torch")
    folders = None if spec is None else spec.submodule_search_locations
    file = Path(folders[0]) / "version.py" if folders else None
    if file is None or not file.is_file():
        return "unknown: torch has no version.py"
    return runpy.run_path(str(file)).get("cuda") or "none: torch is built for CPUs"


def _gpus() -> tuple[str | list[str], str]:
    """The GPUs and the version of their driver, as nvidia-smi says."""
    try:
        done = subprocess.run(
            [*QUERY, "--format=csv,noheader"], capture_output=True, text=True, timeout=SECONDS
        )
    except OSError:
        return "none: there is no nvidia-smi", "none"
    except subprocess.TimeoutExpired:
        return f"none: nvidia-smi: no answer within {SECONDS:g} s", "unknown"
    rows = [line.rpartition(", ") for line in done.stdout.splitlines() if line.count(", ") >= 3]
    if done.returncode or not rows:
        said = " ".join(f"{done.stdout} {done.stderr}".split())
        return f"none: nvidia-smi: {said or f'exit code {done.returncode}'}", "unknown"
    return [card for card, _, _ in rows], rows[0][2]


def _counted(cards: list[str]) -> str:
    """Equal ones together."""
    return "; ".join(f"{n} x {card}" if n > 1 else card for card, n in Counter(cards).items())


def _cpu() -> str:
    """The processor's name, where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()
