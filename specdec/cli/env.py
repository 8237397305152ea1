"""`specdec env`: versions and machine, for a bug report. Imports nothing large, reads no secret."""

import json
import os
import platform
import runpy
import subprocess
from collections import Counter
from contextlib import suppress
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
    cards, driver = _gpus()
    found: dict[str, str | list[str]] = {
        "specdec": specdec.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        **{name: _version(name) for name in PACKAGES},
        "CUDA": _cuda(),
        "driver": driver,
        "GPU": cards,
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "OS": platform.platform(),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if options.json:
        print(json.dumps(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        if isinstance(value, list):
            counts = Counter(value).items()
            value = "; ".join(f"{n} x {each}" if n > 1 else each for each, n in counts)
        print(f"{name:<{width}}{value}")


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "not installed"


def _cuda() -> str:
    """Read what torch was built with from its own file: to import torch would take seconds."""
    spec = find_spec("torch")
    with suppress(OSError):
        file = Path(str(spec and spec.origin)).with_name("version.py")
        return runpy.run_path(str(file)).get("cuda") or "none: torch is built for CPUs"
    return "unknown: torch has no version.py"


def _gpus() -> tuple[str | list[str], str]:
    """Return the GPUs, or why there are none, and the version of their driver."""
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


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
