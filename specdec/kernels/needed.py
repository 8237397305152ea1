"""Passes that may turn out not to be needed, when their launches are in a graph already.

Within `needed_while(count)` the kernels that read much memory get a pointer to a number on the
device, and return at once where it is 0: launches remain, weights are not read, and nothing is
written. Elsewhere the pointer is None, a constant to the compiler, which leaves the check out of
the kernels. Torch twins always compute.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class _Current(threading.local):
    count: Tensor | None = None


_current = _Current()


@contextmanager
def needed_while(count: Tensor | None) -> Iterator[None]:
    """Launches of the body are needed where count [1], int64 on their device, is not 0."""
    previous = _current.count
    _current.count = count
    try:
        yield
    finally:
        _current.count = previous


def need() -> dict[str, Tensor | None]:
    """Give the argument of a kernel that may return at once: needed_ptr."""
    return {"needed_ptr": _current.count}
