"""Breakable capture: one forward as a list of graphs, with marked functions run eagerly between.

`eager_break_during_capture` marks a function. While a BreakableCUDAGraphCapture records, a call of
it ends the current graph, runs eagerly and begins the next one; at all other times it is the plain
function. It writes its results into tensors that it is given: a tensor that it makes has no stable
address, so it may not return one.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from graphs.capturing import exclusive_capture
from graphs.context import context_in
from graphs.modes import CUDAGraphMode
from graphs.protocol import CaptureError, Graph, GraphPool, GraphSession
from graphs.weak import tensors_in

P = ParamSpec("P")
R = TypeVar("R")


def eager_break_during_capture(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` eagerly between two graphs while a breakable capture records; else call it plainly.

    It must be the outermost decorator, outside anything with side effects on the host.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        capture = _thread.active
        # in mode FULL it is captured like any other op
        if capture is None or not capture.is_recording or context_in(CUDAGraphMode.FULL):
            return fn(*args, **kwargs)
        return capture.add_eager(functools.partial(fn, *args, **kwargs))

    return wrapper


class _Thread(threading.local):
    active: "BreakableCUDAGraphCapture | None" = None


_thread = _Thread()


class BreakableCUDAGraphCapture:
    """A context manager around one forward, entered once; then `replay()` runs what it captured.

    pool:    where the graphs live
    owner:   of the forward (a batch descriptor): captures of one may read each other's results
    collect: gc.collect and empty_cache before the first graph
    """

    def __init__(self, pool: GraphPool, *, owner: Hashable = None, collect: bool = True) -> None:
        self.is_recording = False
        self._pool = pool
        self._owner: Hashable = object() if owner is None else owner
        self._collect = collect
        self._steps: list[Callable[[], object]] = []
        self._graphs: list[Graph] = []
        self._session: GraphSession  # while it is active
        self._was_entered = False

    @staticmethod
    def current() -> "BreakableCUDAGraphCapture | None":
        return _thread.active

    @staticmethod
    def is_active() -> bool:
        return _thread.active is not None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_eager_breaks(self) -> int:
        """Calls that run eagerly between the graphs."""
        return len(self._steps) - len(self._graphs)

    def __repr__(self) -> str:
        is_active = _thread.active is self
        state = "recording" if self.is_recording else "active" if is_active else "closed"
        parts = f"{self.num_graphs} graphs, {self.num_eager_breaks} eager breaks"
        return f"<{type(self).__name__} {state}: {parts}>"

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        if self._was_entered:
            problem = "a second forward would be replayed after the first"
            raise CaptureError(f"{self!r} was entered before: {problem}")
        self._body = self._recording()
        self._body.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._body.__exit__(*error)

    def add_eager(self, fn: Callable[[], R]) -> R:
        """End the current graph, run `fn` eagerly, record it, begin the next; returns fn's result.

        A functools.partial is recorded with weak views of its tensors; replay ignores its result.
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
        self._steps.clear()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """The body of the `with` statement; an error in it drops the graphs captured so far."""
        try:
            with exclusive_capture("a breakable capture", self._pool):
                self._pool.hooks.synchronize()
                with self._pool.session(self._owner, collect=self._collect) as self._session:
                    self._begin()
                    self._was_entered = True
                    _thread.active = self
                    try:
                        yield
                    finally:
                        _thread.active = None
                    self._pool.hooks.join()
                    self._end()
        except BaseException:
            self.reset()
            raise
        finally:
            self.is_recording = False

    def _begin(self) -> None:
        self._session.begin()
        self.is_recording = True

    def _end(self) -> None:
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
        problem = f"{name} returned a tensor of its own from an eager break"
        raise CaptureError(f"{problem}: write into an argument instead")
    return functools.partial(fn.func, *pool.weaken(fn.args), **pool.weaken(fn.keywords))
