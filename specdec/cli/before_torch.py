"""What commands refuse before they import torch: wrong values for the engine, and missing paths."""

from pathlib import Path

from specdec.cli.options import check_choice
from specdec.config import EngineConfig
from specdec.options import EngineOptions
from specdec.start.locate import DEMO_PARTS, local_directory, locate
from weights.demo import demo_directory

WIDE_SHAPES = ("llama-8b", "tiny")
WIDE_DTYPES = ("bfloat16", "float32")


def check_models(target: str, draft: str | None, engine: EngineOptions | None = None) -> None:
    """Refuse paths that are not there, and values that no engine takes."""
    EngineConfig(**(engine or {}))
    local_directory(target, "target")
    if draft is not None:
        local_directory(draft, "draft")


def checkpoint_directory(name: str) -> Path:
    """Find a checkpoint, a target or a draft; ValueError if there is none."""
    names = [*DEMO_PARTS["target"], *DEMO_PARTS["draft"]]
    if name.startswith("demo/") and name not in names and not Path(name).is_dir():
        allowed = ", ".join(dict.fromkeys(names))
        raise ValueError(f"{name}: the bundled pair has no such part (allowed: {allowed})")
    is_demo_draft = name in DEMO_PARTS["draft"] and name not in DEMO_PARTS["target"]
    return locate(name, "draft" if is_demo_draft else "target")


def checked_source(source: str, shape: str, dtype: str) -> Path:
    """Find the pair that `specdec widen` is to widen; ValueError for a shape that it has not."""
    check_choice("--shape", shape, WIDE_SHAPES)
    check_choice("--dtype", dtype, WIDE_DTYPES)
    directory = demo_directory("target").parent if source == "demo" else Path(source)
    for part in ("target", "eagle3"):
        if not (directory / part / "config.json").is_file():
            raise ValueError(
                f"--source {source}: no {part}/config.json in it; give demo, or a directory with "
                "target/, eagle3/ and prompts.json"
            )
    return directory
