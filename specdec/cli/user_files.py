"""Files that a user names for a command: regular ones alone, and texts within a bound.

A FIFO may wait for its other end forever, and a device may never end.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_TEXT = 64 << 20  # bytes of a file and characters of standard input: 16 million tokens


def open_regular(file: Path) -> BinaryIO:
    """Open for reading. ValueError: it is no regular file; OSError: it cannot be opened."""
    return os.fdopen(_regular(file, os.O_RDONLY), "rb")


def open_to_append(file: Path) -> BinaryIO:
    """Open for reading and appending, and create it if there is none; errors as `open_regular`."""
    return os.fdopen(_regular(file, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")


def read_text(file: Path) -> str:
    """UTF-8 with any line breaks. ValueError for more than MOST_TEXT; errors as `open_regular`."""
    with open_regular(file) as stream:
        data = stream.read(MOST_TEXT + 1)
    if len(data) > MOST_TEXT:
        raise ValueError(f"{file}: more than {MOST_TEXT} bytes")
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()


def _regular(file: Path, flags: int) -> int:
    # without O_NONBLOCK, opening a FIFO waits for its other end
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raise ValueError(f"{file}: a pipe or a device, a regular file is needed")
