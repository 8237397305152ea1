"""What a command needs beside its target: optional packages, and places for what it writes.

If a package is missing, the line says how to install it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def require_extra(command: str, extra: str, modules: Sequence[str]) -> None:
    """ValueError if a module of the extra is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        install = f'pip install "specdec[{extra}]"'
        raise ValueError(f"{command} needs {', '.join(missing)}: {install}")


def check_outputs(json: Path | None, charts: Path | None) -> None:
    """Before anything is measured: refuse files and charts that cannot be written."""
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"--json {json}: there is no directory {json.parent}")
    if json is not None and json.is_dir():
        raise ValueError(f"--json {json}: a directory; give a file")
    if charts is not None and find_spec("matplotlib") is None:
        install = 'pip install "specdec[bench]"'
        raise ValueError(f"--charts {charts}: charts need matplotlib: {install}")
