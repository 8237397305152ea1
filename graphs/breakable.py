"""Breakable capture: one forward as a list of graphs, with marked functions run eagerly between them.

`eager_break_during_capture` marks a function. While a BreakableCUDAGraphCapture records, a call of it ends the graph at
hand, runs eagerly and begins the next one; at every other time it is the plain function. Results travel in tensors that
the function is given: whatever it makes itself has no stable address, so it may not return it.
"""

import functools
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from graphs.capturing import exclusive_capture
from graphs.context import get_forward_context, has_forward_context
from graphs.errors import CaptureError
from graphs.modes import CUDAGraphMode
from graphs.protocol import Graph, GraphPool, GraphSession
from graphs.weak import tensors_in

P = ParamSpec("P")
R = TypeVar("R")


def eager_break_during_capture(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` eagerly between two graphs when it is met during a breakable capture; else call it plainly.

    The outermost decorator, outside anything with side effects on the host. `fn` writes into tensors that it is given.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        capture = BreakableCUDAGraphCapture.current()
        if capture is None or not capture.is_recording or _mode_is_full():
            return fn(*args, **kwargs)
        return capture.add_eager(functools.partial(fn, *args, **kwargs))

    return wrapper


class _Thread(threading.local):
    active: "BreakableCUDAGraphCapture | None" = None


_thread = _Thread()


class BreakableCUDAGraphCapture:
    """A context manager around one forward, entered once; then `replay()` runs its graphs and eager calls in order.

    pool:    where the graphs live; all of one capture share it
    owner:   names the forward that this is part of (a batch descriptor); captures of one owner may read each other
    collect: gc.collect and empty_cache before the first graph
    """

    def __init__(self, pool: GraphPool, *, owner: Hashable = None, collect: bool = True) -> None:
        self._pool, self._collect = pool, collect
        self._owner: Hashable = object() if owner is None else owner
        self._steps: list[Callable[[], object]] = []
        self._graphs: list[Graph] = []
        self._stack = ExitStack()
        self._session: GraphSession | None = None
        self.is_recording = False
        self._was_entered = False

    @staticmethod
    def current() -> "BreakableCUDAGraphCapture | None":
        """The capture that is active in this thread."""
        return _thread.active

    @staticmethod
    def is_active() -> bool:
        """Whether a breakable capture is active in this thread."""
        return _thread.active is not None

    @property
    def num_graphs(self) -> int:
        """Graphs captured; empty ones are dropped."""
        return len(self._graphs)

    @property
    def num_eager_breaks(self) -> int:
        """Calls that run eagerly between the graphs."""
        return len(self._steps) - len(self._graphs)

    def __repr__(self) -> str:
        state = (
            "recording" if self.is_recording else "active" if _thread.active is self else "closed"
        )
        return f"<{type(self).__name__} {state}: {self.num_graphs} graphs, {self.num_eager_breaks} eager breaks>"

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        if self._was_entered:
            raise CaptureError(
                f"{self!r} was entered before: a second forward would be replayed after the first"
            )
        with ExitStack() as stack:
            stack.enter_context(exclusive_capture("a breakable capture", self._pool))
            self._pool.hooks.synchronize()
            self._session = stack.enter_context(
                self._pool.session(self._owner, collect=self._collect)
            )
            self._begin()
            self._stack = stack.pop_all()
        self._was_entered = True
        _thread.active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.active = None
        try:
            if error is None:
                with self._stack:
                    self._pool.hooks.join()
                    self._end()
            else:
                self._stack.__exit__(kind, error, trace)
        except BaseException:
            self.reset()
            raise
        finally:
            self.is_recording = False
            self._session = None
        if error is not None:
            self.reset()

    def add_eager(self, fn: Callable[[], R]) -> R:
        """End the graph at hand, run `fn` eagerly, record it and begin the next graph; returns what `fn` returned.

        A functools.partial is recorded with weak views in place of its tensors; replay drops what it returns.
        """
        if not self.is_recording:
            return fn()
        self._end()
        result = fn()
        self._steps.append(_recorded(fn, result, self._pool))
        self._begin()
        return result

    def replay(self) -> None:
        """Run the graphs and eager calls in order on the current stream."""
        self._pool.hooks.synchronize()
        for step in self._steps:
            step()

    def reset(self) -> None:
        """Drop the graphs; nothing is left to replay."""
        self._steps.clear()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _begin(self) -> None:
        assert self._session is not None
        self._session.begin()
        self.is_recording = True

    def _end(self) -> None:
        assert self._session is not None
        self.is_recording = False
        graph = self._session.end()
        if graph is not None:
            self._graphs.append(graph)
            self._steps.append(graph.replay)


def _recorded(fn: Callable[[], R], result: R, pool: GraphPool) -> Callable[[], object]:
    """`fn` as replay calls it, without strong references to its tensors."""
    if not isinstance(fn, functools.partial):
        return fn
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([fn.args, fn.keywords])}
    if any(tensor.untyped_storage().data_ptr() not in given for tensor in tensors_in(result)):
        name = getattr(fn.func, "__qualname__", repr(fn.func))
        raise CaptureError(
            f"{name} returned a tensor of its own from an eager break: write into an argument instead"
        )
    args, kwargs = pool.weaken(fn.args), pool.weaken(fn.keywords)
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    return functools.partial(fn.func, *args, **kwargs)


def _mode_is_full() -> bool:
    return has_forward_context() and get_forward_context().runtime_mode is CUDAGraphMode.FULL
