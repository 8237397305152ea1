"""Work on texts, in threads, so that long ones hold up no short one.

There are two lanes, each with a thread, a tokenizer and a process for templates of its own: one for
short texts and one for long ones. In a lane turns are by fair queueing: each work gets a number,
that of the work which runs plus its own size, and the lowest is next. So a small one goes before
the large ones that wait, and a large one waits for no more than its own size of later ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from specdec.requests.tokenizer import Tokenizer

Result = TypeVar("Result")

SHORT = 1 << 15  # characters, or as many as take as long
VALUE_SIZE = 16  # characters that a value beside its text counts for
MOST_VALUES = 1 << 14  # from which on a conversation is long, whatever else it has


class FairTurns:
    """Lets one in at a time. For one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._is_taken = False
        self._clock = 0.0  # the number of the work that runs

    @asynccontextmanager
    async def turn(self, size: float) -> AsyncIterator[None]:
        """Run the body when it is its turn."""
        number = self._clock + size
        if self._is_taken:
            await self._wait(number)
        self._is_taken = True
        self._clock = number
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, number: float) -> None:
        gate = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (number, next(self._order), gate))
        try:
            await gate
        except asyncio.CancelledError:
            if gate.done() and not gate.cancelled():  # it had got its turn
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            gate = heappop(self._waiting)[2]
            if not gate.done():  # else who waited has left
                gate.set_result(None)
                return
        self._is_taken = False


class Lane:
    """Works in a thread of its own. make: its tokenizer, for the first work."""

    def __init__(self, make: Callable[[], Tokenizer]) -> None:
        self._make = make
        self._tokenizer: Tokenizer | None = None
        self._turns = FairTurns()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-prompts")

    async def run(self, size: float, function: Callable[[Tokenizer], Result]) -> Result:
        """Return the function's result, when it has had its turn."""

        def call() -> Result:
            if self._tokenizer is None:
                self._tokenizer = self._make()
            return function(self._tokenizer)

        async with self._turns.turn(size):
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """End the process that renders templates; what runs in the thread ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._tokenizer is not None:
            self._tokenizer.close()


class Lanes:
    """Holds the two. tokenizer: of short texts; long ones get one from the same directory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._short = Lane(lambda: tokenizer)
        self._long = Lane(lambda: Tokenizer(tokenizer.directory))

    async def run(self, size: float, function: Callable[[Tokenizer], Result]) -> Result:
        """Run in a thread. size: characters."""
        lane = self._short if size <= SHORT else self._long
        return await lane.run(size, function)

    def close(self) -> None:
        self._short.close()
        self._long.close()


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
