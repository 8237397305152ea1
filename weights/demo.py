"""The bundled pair: a small target and two drafts for it, as package data."""

import json
from importlib.resources import as_file, files
from pathlib import Path

PARTS = ("target", "eagle3", "eagle1")


def demo_directory(part: str) -> Path:
    """The directory of "target", "eagle3" or "eagle1"."""
    if part not in PARTS:
        raise ValueError(f"demo part {part!r}: one of {', '.join(PARTS)}")
    with as_file(files("weights") / "demo" / part) as directory:
        return directory


def demo_prompts() -> dict[str, object]:
    """prompts.json: "prompts", 48 lists of token ids, and greedy continuations of the first 24."""
    text = (files("weights") / "demo" / "prompts.json").read_text(encoding="utf-8")
    prompts: dict[str, object] = json.loads(text)
    return prompts
