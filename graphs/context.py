"""What one forward reads beside its arguments: attention metadata, slots, and how it is being run.

Thread-local, and set at replay too: the eager breaks of a captured forward read it live.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from graphs.modes import BatchDescriptor, CUDAGraphMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """attn_metadata is the engine's own; the address check alone looks for tensors inside it."""

    attn_metadata: object
    slot_mapping: Tensor | None
    num_tokens: int
    runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None

    def graph_key(self) -> BatchDescriptor:
        """The descriptor, which a forward that is captured or replayed must have."""
        if self.batch_descriptor is None:
            needed = "a batch_descriptor in the forward context"
            raise ValueError(f"runtime_mode={self.runtime_mode} needs {needed}")
        return self.batch_descriptor


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one of this thread; the previous one returns afterwards."""
    previous = _current.context
    _current.context = context
    try:
        yield context
    finally:
        _current.context = previous


def get_forward_context() -> ForwardContext:
    """The current context; RuntimeError outside `set_forward_context`."""
    if _current.context is None:
        raise RuntimeError("no forward context: run the model inside set_forward_context(...)")
    return _current.context


def context_in(mode: CUDAGraphMode) -> ForwardContext | None:
    context = _current.context
    return context if context is not None and context.runtime_mode is mode else None
