"""Untrusted files of a checkpoint: only regular ones are opened, anything else is a problem.

A link may dangle or loop, a name may be too long for the system or belong to a directory, or to a
FIFO on which a reader waits forever; JSON may be nested too deep for any code that walks it.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from weights.errors import Problems

MAX_JSON_BYTES = 100_000_000  # the limit of the reference reader for a header
MAX_JSON_LEVELS = 64

PairsHook = Callable[[list[tuple[str, object]]], object]


def is_there(file: Path) -> bool:
    """Whether anything has this name, even a dangling link."""
    return os.path.lexists(file)


def is_file_name(name: str) -> bool:
    """Whether an index may name it: a file in its own directory, no path."""
    return Path(name).name == name and name not in ("", "..")


def open_file(file: Path, problems: Problems, fatal: bool = False) -> BinaryIO | None:
    """Open `file` for reading; None and a problem if it is no regular file or cannot be opened."""
    try:
        # without O_NONBLOCK, opening a FIFO waits for its other end
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        problems.add(f"{file.name}: {_reason(file, error)}", fatal)
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a directory" if file.is_dir() else "not a file"
    problems.add(f"{file.name}: {kind}, a regular file is needed", fatal)
    return None


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "a link to nothing" if is_there(file) else "missing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_object(file: Path, problems: Problems, fatal: bool = False) -> dict[str, object] | None:
    """The JSON object in `file`; None and a problem if there is none."""
    stream = open_file(file, problems, fatal)
    if stream is None:
        return None
    try:
        with stream:
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        problems.add(f"{file.name}: {_reason(file, error)}", fatal)
        return None
    if len(text) > MAX_JSON_BYTES:
        problems.add(f"{file.name}: more than {MAX_JSON_BYTES} bytes", fatal)
        return None
    return parse_object(text, file.name, problems, fatal)


def parse_object(
    text: bytes, what: str, problems: Problems, fatal: bool = False, hook: PairsHook | None = None
) -> dict[str, object] | None:
    """The JSON object in `text`, else None and a problem about `what`. hook: see json.loads."""
    try:
        values = json.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        problems.add(f"{what} is not JSON ({error})", fatal)
        return None
    if not isinstance(values, dict):
        problems.add(f"{what} is a JSON {type(values).__name__}, not an object", fatal)
        return None
    if _is_deep(values):
        problems.add(f"{what} is nested more than {MAX_JSON_LEVELS} levels deep", fatal)
        return None
    return values


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_JSON_LEVELS):
        level = [item for outer in level for item in _items(outer)]
    return bool(level)


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
