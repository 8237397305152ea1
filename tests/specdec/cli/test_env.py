"""`specdec env`: what a bug report needs, with a GPU and without, in a moment."""

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import specdec
import specdec.cli.env

CARDS = "NVIDIA H200, 9.0, 143771 MiB, 580.65.06\nNVIDIA H200, 9.0, 143771 MiB, 580.65.06\n"


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """smi(script): a program nvidia-smi of these lines of shell; None: there is none."""

    def install(script: str | None) -> None:
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))

    return install


def test_a_report_without_a_gpu_has_all_versions(run, smi):
    smi(None)
    code, out, err = run("env")
    assert (code, err) == (0, "")
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert lines["specdec"] == specdec.__version__
    assert lines["python"].startswith(platform.python_version())
    assert lines["torch"] == version("torch")
    assert lines["transformers"] == version("transformers")
    assert platform.release() in lines["OS"]
    assert lines["GPU"] == "none: there is no nvidia-smi"
    assert {"triton", "CUDA", "driver", "CPU"} <= lines.keys()
    assert max(map(len, (line.split(None, 1)[0] for line in out.splitlines()))) < 20


def test_each_gpu_and_its_driver_is_named(run, smi, tmp_path):
    (tmp_path / "cards").write_text(CARDS)
    smi(f"cat {tmp_path}/cards")
    found = json.loads(run("env", "--json")[1])
    assert found["GPU"] == ["NVIDIA H200, 9.0, 143771 MiB"] * 2
    assert found["driver"] == "580.65.06"
    assert "2 x NVIDIA H200, 9.0, 143771 MiB\n" in run("env")[1]


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo 'Failed to initialize NVML: mismatch'; exit 18", "nvidia-smi: Failed to initialize"),
        ("exit 9", "nvidia-smi: exit code 9"),
        ("exec sleep 60", "nvidia-smi: no answer within 0.2 s"),
        ("echo odd", "nvidia-smi: odd"),
    ],
)
def test_a_driver_that_does_not_work_is_quoted(run, smi, monkeypatch, script, words):
    monkeypatch.setattr(specdec.cli.env, "SECONDS", 0.2)
    smi(script)
    code, out, _ = run("env")
    assert code == 0
    assert f"none: {words}" in out


def test_variables_are_shown_but_no_secret(run, smi, monkeypatch):
    smi(None)
    monkeypatch.setenv("SPECDEC_LOG", "info")
    monkeypatch.setenv("SPECDEC_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    _, out, _ = run("env")
    assert "SPECDEC_LOG" in out
    assert "secret" not in out


def test_a_package_that_is_missing_is_said_to_be(run, smi, monkeypatch):
    smi(None)
    monkeypatch.setattr(specdec.cli.env, "PACKAGES", ("torch", "no-such-package"))
    out = run("env")[1]
    assert re.search(r"^no-such-package +not installed$", out, re.MULTILINE)


def test_a_report_waits_for_no_torch():
    code = (
        "import sys; from specdec.cli import main\n"
        "try: main(['env'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False"
