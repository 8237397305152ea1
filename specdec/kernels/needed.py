"""Passes that may turn out not to be needed, when their launches are in a graph already.

Within `needed_while(count)` the kernels that read much memory get a pointer to a number on the
device, and return at once where it is 0: launches remain, weights are not read, and nothing is
written. Elsewhere the pointer is None, a constant to the compiler, which leaves the check out of
the kernels. Torch twins always compute.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from specdec.kernels import setting

_count: ContextVar[Tensor | None] = ContextVar("_count", default=None)


def needed_while(count: Tensor | None) -> AbstractContextManager[None]:
    """Launches of the body are needed where count [1], int64 on their device, is not 0."""
    return setting(_count, count)


def need() -> dict[str, Tensor | None]:
    """Give the argument of a kernel that may return at once: needed_ptr."""
    return {"needed_ptr": _count.get()}
