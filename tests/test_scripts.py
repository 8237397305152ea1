"""The scripts run on the bundled pair as their docstrings say."""

import json
import runpy
import shlex
import sys

import pytest


@pytest.fixture
def run(capsys, monkeypatch):
    """run("scripts.generate", ...): what a script prints."""

    def call(module: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [module, *args])
        runpy.run_module(module, run_name="__main__")
        return capsys.readouterr().out

    return call


def test_load_checkpoint_prints_both_bindings_and_times(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run("scripts.load_checkpoint", "demo", "demo/eagle1")
    out = capsys.readouterr().out

    assert ": llama" in out
    assert ": eagle-1" in out
    assert out.count("  loaded: ") == 2


def test_load_checkpoint_ends_with_the_error(run, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        run("scripts.load_checkpoint", str(tmp_path))
    assert "nothing loaded" in capsys.readouterr().err


def test_generate_prints_texts_and_ends_with_json(run):
    out = run("scripts.generate", "def f(", "import os", "--max-tokens", "8")

    assert out.count("--- acceptance length") == 2
    assert json.loads(out.splitlines()[-1])["num_rounds"] > 0


def test_sampling_rounds_times_every_case(run):
    out = run("scripts.sampling_rounds", "--batches", "1", "--num-rounds", "1")

    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["case"] for row in rows][:2] == ["greedy", "T=1"]
    assert all(row["round_ms"] > 0 for row in rows)


def test_soak_says_that_nothing_is_wrong(run):
    with pytest.raises(SystemExit, match="0"):
        run("scripts.soak", "--num-requests", "3")


def test_bench_measures_every_k_beside_plain_decoding(run, capsys):
    tiny = shlex.split("-k 2 --num-prompts 2 --max-tokens 8 --repeats 1 --device cpu")
    with pytest.raises(SystemExit, match="0"):
        run("scripts.bench", *tiny)

    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["num_speculative_tokens"] for row in results] == [0, 2]
    assert all(row["tokens_per_second"] > 0 for row in results)
