"""benchmarks/ stays small, and its README names files that are there."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()
NAMED = set(re.findall(r"\d{4}-\d\d-\d\d-[\w.-]+\.(?:json|png)", README))
KEPT = {file.name for file in BENCHMARKS.iterdir()} - {"README.md"}


def test_few_files_and_lines_are_kept():
    assert len(KEPT) + 1 <= 30
    assert len(README.splitlines()) <= 250


def test_the_readme_names_every_file_and_no_other():
    assert NAMED == KEPT
