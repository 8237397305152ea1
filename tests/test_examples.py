"""Each example runs as its docstring says, and shows what it claims."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPECTED = {
    "chat.py": ("> class Stack(object):", "(64 of "),
    "stream.py": ("class Config(object):", "tokens of each piece: 1 "),
    "async_many.py": ("short: 16 tokens, ended by length", "ended by abort"),
    "compare_drafts.py --max-tokens 16": ("demo/eagle1", "gave the same texts: True"),
    "sampling_seeds.py": (
        "same text: True",
        "another text:         True",
        "no text:                 True",
    ),
}


def test_every_example_is_tried():
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert files == {command.split()[0] for command in EXPECTED}


@pytest.mark.parametrize("command", EXPECTED)
def test_an_example_shows_what_it_claims(command):
    name, *options = command.split()
    run = [sys.executable, f"examples/{name}", *options]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=_with_sources())
    assert done.returncode == 0, done.stderr[-2000:]
    assert [words for words in EXPECTED[command] if words not in done.stdout] == []
    assert "False" not in done.stdout


def _with_sources() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
