"""The size of this process's heap, for objects whose size no library tells."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PROBE_BYTES = 1 << 24  # more than other threads allocate in a moment
STATM = Path("/proc/self/statm")


class Mallinfo(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def heap_bytes() -> int:
    """Count the bytes that are allocated or, where that is not known, resident."""
    ask = _mallinfo()
    if ask is None:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = ask()
    return int(found.uordblks + found.hblkhd)


def give_back() -> None:
    """Return free memory to the system, which the C library may have kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _mallinfo() -> Callable[[], Any] | None:
    """Find mallinfo2 of glibc 2.33 and later, if no other library allocates for the process."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = Mallinfo
    before = ask()
    block = bytearray(PROBE_BYTES)
    after = ask()
    grown = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return ask if grown >= len(block) // 2 else None
