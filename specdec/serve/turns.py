"""A lock that threads get in the order in which they ask for it, for what many of them share.

A plain lock may be taken again and again by the thread that has just released it. `soon` is for finalisers, which the
garbage collector calls anywhere, even in the middle of the thread's own turn, and which therefore cannot wait.
"""

import os
import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """`with turns:` waits for a turn and ends it. Not reentrant."""

    def __init__(self) -> None:
        self._line: deque[threading.Lock] = (
            deque()
        )  # the first has its turn, the others wait for their lock
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
        """Have `call` called in a turn without waiting for one: now, or by the thread that has it, as it ends."""
        self._calls.append(call)
        self._call_if_free()

    def _call_if_free(self) -> None:
        while self._calls and self._take_if_free():
            try:
                self._call()
            finally:
                self._leave(self._line[0])

    def _call(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _take_if_free(self) -> bool:
        # whoever holds the mutex begins or ends a turn, and looks for calls afterwards
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._line:
                return False
            self._line.append(threading.Lock())
            return True
        finally:
            self._mutex.release()

    def _leave(self, gate: threading.Lock) -> None:
        with self._mutex:
            had_turn = bool(self._line) and self._line[0] is gate
            if gate in self._line:
                self._line.remove(gate)
            if had_turn and self._line:
                self._line[0].release()

    def _move_to_this_process(self) -> None:
        """In a forked child only the thread that forked goes on."""
        if self._line:
            raise RuntimeError(
                f"process {self._process} was forked while another of its threads was generating, so that the engine "
                f"in process {os.getpid()} is in the middle of a step: build a new one here"
            )
        self._mutex, self._process = threading.Lock(), os.getpid()
