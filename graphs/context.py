"""What one forward reads beside its arguments: attention metadata, slots, and how it is being run.

Thread-local, set by a context manager, at replay too: the eager segments of a broken graph read it live.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from graphs.modes import BatchDescriptor, CUDAGraphMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """attn_metadata is the engine's own object; graphs/ only looks for tensors inside it when it checks addresses."""

    attn_metadata: object
    slot_mapping: Tensor | None
    num_tokens: int
    runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one of this thread for the duration; the previous one returns afterwards."""
    previous, _current.context = _current.context, context
    try:
        yield context
    finally:
        _current.context = previous


def get_forward_context() -> ForwardContext:
    """The current context; RuntimeError outside `set_forward_context`."""
    if _current.context is None:
        raise RuntimeError("no forward context: run the model inside set_forward_context(...)")
    return _current.context


def has_forward_context() -> bool:
    """Whether a forward is running in this thread."""
    return _current.context is not None
