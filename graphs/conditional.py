"""Parts of a full graph that a replay leaves out where a number on the device is 0.

    run_if(count, fn)        while `capture_graph` records, `fn` becomes a part of the graph that a
                             replay runs only where count [1] is not 0; else it is called plainly

What comes before and after such a part is a part too, and they run in order. A part that is left
out leaves every tensor as it was, so others read of its results only static buffers, or nothing
that matters. Inside a part, and in a breakable capture, `run_if` calls plainly as well.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from graphs.protocol import Graph, GraphPool, GraphSession, Part


class _Thread(threading.local):
    recording: "Parts | None" = None


_thread = _Thread()


def run_if(count: Tensor, fn: Callable[[], None]) -> None:
    """count: int64 [1], a static buffer on the device of the graph."""
    parts = _thread.recording
    if parts is None:
        fn()
    else:
        parts.add(count, fn)


class Parts:
    """The parts of one call, in order, as they are captured in a session that has begun."""

    def __init__(self, pool: GraphPool, session: GraphSession) -> None:
        self._pool = pool
        self._session = session
        self._found: list[Part] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the body `run_if` makes parts; an error in it drops them."""
        _thread.recording = self
        try:
            yield
        except BaseException:
            for part in self._found:
                part.graph.reset()
            raise
        finally:
            _thread.recording = None

    def add(self, count: Tensor, fn: Callable[[], None]) -> None:
        """End the current part, capture `fn` as one of its own, begin the next."""
        self._end(None)
        self._session.begin()
        _thread.recording = None
        fn()
        _thread.recording = self
        self._end(count)
        self._session.begin()

    def end(self) -> Graph | None:
        """What replays the call; None if there is nothing to launch."""
        if not self._found:
            return self._session.end()
        self._end(None)
        return self._pool.joined(self._found)

    def _end(self, count: Tensor | None) -> None:
        graph = self._session.end(is_part=True)
        if graph is not None:
            self._found.append(Part(graph, count))
