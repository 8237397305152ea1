"""What is printed of a hostile checkpoint: safe for terminals, bounded, in linear time."""

import json
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.cli import main
from tests.weights.tiny import tiny_target, write_target
from weights import CheckpointError, inspect_checkpoint, load_target
from weights.errors import MOST_LINES, Problems, shown

# clears the screen, sets a title, a C1 control, reverses the text, fakes a line, a lone surrogate
NAME = "model.\x1b[2J\x1b]0;title\x07\x9b31m\u202e\n  problem: none\ud800"


@pytest.mark.parametrize(
    "char", ["\x1b", "\n", "\r", "\x07", "\x7f", "\x9b", "\u202e", "\u2028", "\ud800"]
)
def test_what_is_not_printable_is_escaped(char):
    assert shown(f"a{char}b").isprintable()
    assert shown(f"a{char}b") == f"a{ascii(char)[1:-1]}b"


def test_what_is_printable_stays_and_a_long_line_loses_its_middle():
    assert shown("model.layers.0 \u00e9 \u4e2d \\x1b") == "model.layers.0 \u00e9 \u4e2d \\x1b"
    cut = shown("a" * 10**6 + "\x1b" * 10**6, 101)
    assert len(cut) == 101
    assert cut == shown(cut, 101)
    assert cut.startswith("aaa")
    assert cut.endswith("\\x1b")


@pytest.fixture
def hostile(tmp_path):
    """A target with one tensor too many."""
    write_target(tmp_path, tiny_target())
    file = tmp_path / "model.safetensors"
    plain = "model.surprise" + "x" * len(json.dumps(NAME))
    save_file(load_file(file) | {plain: torch.zeros(1)}, file)
    old, new = json.dumps(plain).encode(), json.dumps(NAME).encode()
    file.write_bytes(file.read_bytes().replace(old, new + b" " * (len(old) - len(new))))
    return tmp_path


def is_safe(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and "\n  problem: none" not in text


def test_an_error_escapes_a_tensors_name(hostile):
    with pytest.raises(CheckpointError, match="unexpected") as error:
        load_target(hostile, progress=False)
    assert is_safe(str(error.value))
    assert all(problem.isprintable() for problem in error.value.problems)


def test_inspect_escapes_a_tensors_name(hostile, capsys):
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main(["inspect", str(hostile), *options])
        printed = capsys.readouterr()
        assert is_safe(printed.out + printed.err)
        assert "ud800" in printed.out


def test_an_ignored_name_is_escaped_in_the_report(tmp_path):
    write_target(tmp_path, tiny_target())
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.\x1b[2J.rotary_emb.inv_freq": torch.zeros(1)}, file)
    report = load_target(tmp_path, progress=False).report
    assert is_safe(str(report))
    assert "\\x1b[2J.rotary_emb.inv_freq" in str(report)


def test_a_name_of_megabytes_does_not_widen_the_table(tmp_path):
    write_target(tmp_path, tiny_target())
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"x" * 10**6: torch.zeros(1)}, file)
    assert len(str(inspect_checkpoint(tmp_path))) < 10**5


def test_a_hundred_thousand_problems_are_fifty_lines_and_are_not_counted(monkeypatch):
    problems, escaped = Problems(Path("dir")), []
    monkeypatch.setattr("weights.errors.shown", lambda line: escaped.append(line) or shown(line))
    start = time.perf_counter()
    for i in range(100_000):
        problems.add(f"model.safetensors: unexpected tensor{i} [1]")
    with pytest.raises(CheckpointError, match="more than 50 problems") as error:
        problems.raise_if_any()
    assert time.perf_counter() - start < 10
    assert len(error.value.problems) == MOST_LINES + 1  # the last says that there are more
    assert len(escaped) < 3 * MOST_LINES
    assert str(error.value).count("\n") == MOST_LINES + 1
    assert str(error.value).endswith("tensor49 [1]\n  and more")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_fifty_problems_are_all_listed():
    problems = Problems(Path("dir"))
    for i in range(MOST_LINES):
        problems.add(f"line {i}")
    with pytest.raises(CheckpointError, match="50 problems") as error:
        problems.raise_if_any()
    assert str(error.value).endswith("\n  - line 49")


@pytest.mark.parametrize("name", ["surprise{}.weight", "surprise{}.qweight"])
def test_thousands_of_unexpected_tensors_are_fifty_lines_everywhere(tmp_path, capsys, name):
    write_target(tmp_path, tiny_target())
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name.format(i): torch.zeros(1) for i in range(2000)}, file)
    with pytest.raises(CheckpointError, match="more than 50 problems") as error:
        load_target(tmp_path, progress=False)
    assert len(error.value.problems) == MOST_LINES + 1
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit, match="1"):
            main(["inspect", str(tmp_path), *options])
        found = capsys.readouterr().out
        problems = json.loads(found)["problems"] if options else re.findall("problem: (.*)", found)
        assert (len(problems), problems[-1]) == (MOST_LINES + 1, "and more")
