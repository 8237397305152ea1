"""The bundled pairs: small targets and drafts for them, as package data."""

import json
from importlib.resources import as_file, files
from pathlib import Path

# the pair without experts has three drafts
PARTS = {
    "target": "demo/target",
    "eagle3": "demo/eagle3",
    "eagle1": "demo/eagle1",
    "dspark": "demo/dspark",
    "experts/target": "demo_experts/target",
    "experts/eagle3": "demo_experts/eagle3",
}


def demo_directory(part: str) -> Path:
    """The directory of one of PARTS."""
    if part not in PARTS:
        raise ValueError(f"demo part {part!r}: one of {', '.join(PARTS)}")
    with as_file(files("weights") / PARTS[part]) as directory:
        return directory


def demo_prompts() -> dict[str, object]:
    """prompts.json: "prompts", 48 lists of token ids, and greedy continuations of the first 24.

    Continuations are those of the pair without experts.
    """
    text = (files("weights") / "demo" / "prompts.json").read_text(encoding="utf-8")
    prompts: dict[str, object] = json.loads(text)
    return prompts
