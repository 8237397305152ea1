"""Imports go one way, at the top of a file; `import specdec` itself costs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.layout import LATE_IMPORTS, ROWS, violations

ROOT = Path(__file__).parent.parent


def test_all_imports_follow_the_layout():
    assert violations(ROOT) == []


def test_late_imports_are_allowed_in_files_that_exist():
    assert [path for path in LATE_IMPORTS if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "path, source, problem",
    [
        ("graphs/a.py", "import weights", "graphs may not import weights"),
        ("graphs/a.py", "from specdec.llm import LLM", "graphs may not import specdec"),
        ("graphs/a.py", "import transformers", "graphs may not import transformers"),
        (
            "specdec/bench/a.py",
            "from unittest.mock import patch",
            "unittest: what may be exchanged",
        ),
        ("specdec/engine.py", "import unittest.mock as mock", "unittest: what may be exchanged"),
        ("weights/a.py", "from unittest import mock", "unittest: what may be exchanged"),
        ("weights/a.py", "from graphs.modes import X", "weights may not import graphs"),
        ("weights/a.py", "import numpy as np", "weights may not import numpy"),
        ("specdec/engine.py", "import starlette", "specdec.engine may not import starlette"),
        ("specdec/engine.py", "from .llm import LLM", "relative import"),
        ("specdec/kernels/a.py", "from specdec.sizes import X", "may not import specdec.sizes"),
        ("specdec/kernels/a.py", "from weights.config import X", "may not import weights.config"),
        ("specdec/requests/a.py", "import torch", "specdec.requests may not import torch"),
        ("specdec/requests/a.py", "import transformers", "may not import transformers"),
        (
            "specdec/scheduling/a.py",
            "from specdec.rounds.state import X",
            "may not import specdec.rounds",
        ),
        (
            "specdec/models/a.py",
            "from specdec.target import Target",
            "may not import specdec.target",
        ),
        ("specdec/target.py", "from specdec.step import Acts", "may not import specdec.step"),
        ("specdec/step.py", "import specdec.runner", "may not import specdec.runner"),
        ("specdec/runner.py", "from specdec import engine", "may not import specdec.engine"),
        ("specdec/engine.py", "from specdec.cli.generate import X", "may not import specdec.cli"),
        (
            "specdec/bench/yardsticks.py",
            "from specdec.kernels.attention.launch import X",
            "may not import specdec.kernels",
        ),
        ("specdec/utils.py", "from specdec.requests.stats import X", "has no row"),
        ("specdec/engine.py", "def f():\n    import json", "import inside a function"),
        ("specdec/engine.py", "from typing import TYPE_CHECKING", "TYPE_CHECKING"),
        ("specdec/engine.py", "import importlib\nimportlib.import_module('x')", "import_module"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, path, source, problem):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)

    found = violations(tmp_path)
    assert found
    assert all(line.startswith(path) and problem in line for line in found)


@pytest.mark.parametrize(
    "path, source",
    [
        ("graphs/a.py", "import torch\nfrom graphs.modes import X"),
        ("weights/a.py", "import json\nfrom torch import Tensor\nfrom weights.config import X"),
        ("specdec/kernels/a.py", "import torch\nfrom specdec.kernels.b import Y"),
        (
            "specdec/llm.py",
            "from specdec.engine import Engine\nfrom weights.load import load_target",
        ),
        ("specdec/cli/__init__.py", "def f():\n    from specdec.cli.verify import run_verify"),
    ],
)
def test_what_the_layout_allows_passes(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)

    assert violations(tmp_path) == []


def test_every_row_has_its_place():
    names = [place.replace(".", "/") for place in ROWS]
    assert [
        name for name in names if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()
    ] == []


def test_the_host_side_runs_without_torch():
    folders = [ROOT / "specdec" / name for name in ("requests", "scheduling")]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    modules = ["specdec.arguments", "specdec.config", "specdec.sizes"]
    modules += [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    imports = "; ".join(f"import {module}" for module in modules)
    assert (
        _python(f"import sys; sys.modules['torch'] = None; {imports}; print(len(sys.modules) > 0)")
        == "True"
    )


def test_import_specdec_loads_nothing_heavy():
    assert _heavy_after("import specdec") <= set()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["enable", "disable"])
def test_python_collects_no_garbage_while_the_engine_is_imported(before):
    code = (
        f"import gc, specdec; gc.{before}(); walks = []; gc.callbacks.append("
        "lambda *_: walks.append(1)); specdec.LLM; count = len(walks); print(count, gc.isenabled())"
    )
    assert _python(code) == f"0 {before == 'enable'}"


def test_an_engine_generates_without_optional_packages():
    """Without a GPU it does so without Triton, too."""
    code = (
        "from specdec import LLM, AsyncLLM, SamplingParams; AsyncLLM; "
        "llm = LLM('demo', {'model': 'demo'}, device='cpu'); "
        "llm.generate('a', SamplingParams(max_tokens=4), use_tqdm=False)"
    )
    assert _heavy_after(code) <= {"torch", *(("triton",) if torch.cuda.is_available() else ())}


def test_the_command_line_loads_what_a_command_needs_when_it_is_called():
    assert _heavy_after("import specdec.cli") <= set()


def test_the_client_of_a_load_waits_for_no_torch():
    assert _heavy_after("import specdec.cli.bench_serve") <= set()


@pytest.mark.slow
def test_importing_the_engine_takes_little_more_than_importing_torch():
    engine = "import torch, triton" if torch.cuda.is_available() else "import torch"
    assert _processor_seconds("from specdec import LLM") <= _processor_seconds(engine) + 0.7


def _processor_seconds(code: str) -> float:
    """The least processor time of a process that runs `code`, in two runs."""
    usage = "__import__('resource').getrusage(0)"
    timed = f"{code}; usage = {usage}; print(usage.ru_utime + usage.ru_stime)"
    return min(float(_python(timed)) for _ in range(2))


def _heavy_after(code: str) -> set[str]:
    """Which heavy packages `code` has loaded."""
    heavy = (
        "torch",
        "triton",
        "transformers",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "ray",
        "matplotlib",
    )
    return set(_python(f"import sys; {code}; print(*set({heavy}) & set(sys.modules))").split())


def _python(code: str) -> str:
    """What `code` prints in a process of its own, without the tests' TRITON_INTERPRET."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
