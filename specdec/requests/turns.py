"""A lock that threads get in the order in which they ask for it.

A plain lock may be taken again and again by the thread that has just released it. `call_soon` is
for finalizers, which cannot wait: the garbage collector runs them anywhere, even in the middle of
the thread's own turn.
"""

import os
import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """`with turns:` waits for a turn and ends it. Not reentrant."""

    def __init__(self) -> None:
        # the thread of the first lock has its turn, the others wait for their locks
        self._line: deque[threading.Lock] = deque()
        self._mutex = threading.Lock()  # of the line
        self._calls: deque[Callable[[], object]] = deque()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._move_to_this_process()
        gate = threading.Lock()
        gate.acquire()
        try:
            with self._mutex:
                self._line.append(gate)
                is_first = self._line[0] is gate
            if not is_first:
                gate.acquire()
        except BaseException:  # Ctrl-C
            self._leave(gate)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._call()
        finally:
            self._leave(self._line[0])
        self._call_if_free()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in a turn without waiting: now, or when the thread in its turn ends it."""
        self._calls.append(call)
        self._call_if_free()

    def _call_if_free(self) -> None:
        # a thread that holds the mutex begins or ends a turn, and runs the calls afterwards
        while self._calls and self._mutex.acquire(blocking=False):
            try:
                if self._line:
                    return
                self._line.append(threading.Lock())
            finally:
                self._mutex.release()
            try:
                self._call()
            finally:
                self._leave(self._line[0])

    def _call(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _leave(self, gate: threading.Lock) -> None:
        with self._mutex:
            had_turn = bool(self._line) and self._line[0] is gate
            if gate in self._line:
                self._line.remove(gate)
            if had_turn and self._line:
                self._line[0].release()

    def _move_to_this_process(self) -> None:
        """In a forked child only the thread that forked exists."""
        if self._line:
            raise RuntimeError(
                f"process {self._process} was forked while another of its threads was generating, "
                f"so the engine in process {os.getpid()} is in the middle of a step: build a new "
                "one here"
            )
        self._mutex = threading.Lock()
        self._process = os.getpid()
