"""Work on texts, in threads, so that long ones hold up no short one.

There are two lanes, each with a thread, a tokenizer and a process for templates of its own: one for
short texts and one for long ones. In a lane turns are by fair queueing: each work gets a number,
that of the work which runs plus its own size, and the lowest is next. So a small one goes before
the large ones that wait, and a large one waits for no more than its own size of later ones.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

from specdec.requests.tokenizer import Tokenizer

Result = TypeVar("Result")
Work = tuple[Future[Any], Callable[[Tokenizer], Any]]

SHORT = 1 << 15  # characters, or as many as take as long
VALUE_SIZE = 16  # characters that a value beside its text counts for
MOST_VALUES = 1 << 14  # from which on a conversation is long, whatever else it has


class Lane:
    """Works in a thread of its own, in fair turns. make: its tokenizer, for the first work."""

    def __init__(self, make: Callable[[], Tokenizer]) -> None:
        self._make = make
        self._tokenizer: Tokenizer | None = None
        self._works = PriorityQueue[tuple[float, int, Work | None]]()
        self._order = count()
        self._clock = 0.0  # the number of the work that runs
        threading.Thread(target=self._run, name="specdec-prompts", daemon=True).start()

    async def run(self, size: float, function: Callable[[Tokenizer], Result]) -> Result:
        """Return the function's result, when it has had its turn. Cancelled, it may lose it."""
        answer = Future[Result]()
        self._works.put((self._clock + size, next(self._order), (answer, function)))
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        while True:
            number, _, work = self._works.get()
            if work is None:
                return
            answer, function = work
            if answer.set_running_or_notify_cancel():
                self._clock = number
                try:
                    self._tokenizer = self._tokenizer or self._make()
                    answer.set_result(function(self._tokenizer))
                except BaseException as error:
                    answer.set_exception(error)
            del work, answer, function  # they may be large

    def close(self) -> None:
        """End the thread after its work, and the process that renders templates at once."""
        self._works.put((-math.inf, next(self._order), None))
        if self._tokenizer is not None:
            self._tokenizer.close()


def size_of(*values: object) -> int:
    """Estimate how many characters have to be read or written for what JSON can hold."""
    size = num_values = 0
    waiting = [*values]
    while waiting and num_values < MOST_VALUES:
        value = waiting.pop()
        num_values += 1
        size += VALUE_SIZE
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            size += sum(map(len, map(str, value)))
            waiting += value.values()
        elif isinstance(value, Sequence):
            waiting += value
    return size
