"""Read what a user gives as text: the values of options, files, standard input.

Files are regular ones alone, and texts have a bound: a FIFO may wait for its other end forever, and
a device may never end.
"""

import errno
import io
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from specdec.sizes import TreeShape
from specdec.speculative_config import AUTO

STANDARD_INPUT = "-"  # as a prompt or a file
MOST_TEXT = 64 << 20  # bytes of a file and characters of standard input: 16 million tokens


def numbers(
    kind: type[int] | type[float], bounds: tuple[float, float] | None, option: str, text: str
) -> list[int] | list[float]:
    """Read "0,3,5". bounds: the least and the greatest number, if any."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        words = "integers" if kind is int else "numbers"
        raise ValueError(f"{option} {text}: give {words} with commas between them") from None
    if bounds and not all(bounds[0] <= value <= bounds[1] for value in values):
        allowed = f"numbers of at least {bounds[0]}, at most {bounds[1]}"
        raise ValueError(f"{option} {text}: give {allowed}")
    return values


def trees(option: str, text: str) -> list[TreeShape]:
    """Read "8x6x4,16x6x4": rows, levels and top_k of draft trees."""
    return [tree(option, part, "8x6x4,16x6x4") for part in text.split(",")]


def tree(option: str, text: str, example: str = "16x6x4") -> TreeShape:
    """Read one tree. The option's name and the example are for errors."""
    try:
        num_rows, num_levels, top_k = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"{option} {text}: give rows x levels x top_k, as in {example}") from None
    shape = TreeShape(num_levels=num_levels, top_k=top_k, num_nodes=num_rows - 1)
    if min(num_levels, top_k - 1) < 1 or not 1 <= shape.num_nodes <= shape.num_candidates:
        raise ValueError(
            f"{option} {text}: a tree has 1 level or more, a top_k of 2 or more, and from 2 rows "
            "to as many as the root and all its candidates"
        )
    return shape


def num_drafts(option: str, text: str) -> int | str:
    """Read a number of drafts, or "auto"."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ValueError(f"{option} {text}: give an integer, or auto") from None


def pairs(option: str, text: str) -> dict[str, str]:
    """Read "a=b,c=d"."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise ValueError(f"{option} {text}: give NAME=VALUE, with commas between them")
    return {name: value for name, _, value in parts}


def check_choice(option: str, given: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if an option has another value."""
    if given not in allowed:
        raise ValueError(f"{option} {given}: allowed are {', '.join(allowed)}")


def text_of(option: str, file: str) -> str:
    """Read a file of UTF-8 with any line breaks; `-` is standard input."""
    if file == STANDARD_INPUT:
        return read_input(option.removeprefix("--"))
    try:
        with open_regular(Path(file)) as stream:
            data = stream.read(MOST_TEXT + 1)
        if len(data) > MOST_TEXT:
            raise ValueError(f"{file}: more than {MOST_TEXT} bytes")
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: no text in UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; give a text file") from error
    except ValueError as error:
        wanted = f"give a text file, or {STANDARD_INPUT} for standard input"
        raise ValueError(f"{option} {error}; {wanted}") from error


def read_input(what: str) -> str:
    """Read standard input without its last line break; ValueError if it is empty."""
    try:
        text = "" if sys.stdin is None else sys.stdin.read(MOST_TEXT + 1)  # None: it is closed
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: no text in UTF-8: {error}") from error
    if len(text) > MOST_TEXT:
        raise ValueError(f"standard input: more than {MOST_TEXT} characters for the {what}")
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"no {what}: standard input is empty")
    return text


def open_regular(file: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a file. ValueError: it is no regular file; OSError: it cannot be opened."""
    # without O_NONBLOCK, opening a FIFO waits for its other end
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raise ValueError(f"{file}: a pipe or a device, a regular file is needed")
