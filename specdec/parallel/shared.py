"""Memory that rank 0 shares with the other ranks: a line of numbers for each, and the ring's bytes.

It is a file without a name, passed by its descriptor, so it ends with its processes and leaves
nothing in /dev/shm. A number is written by one process alone, as a whole.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Self

RING_BYTES = 1 << 22  # the masks of 64 guided rows take 1 MB, where ids are 128k
NUM_DIGESTS = 64  # steps whose digests are kept: more than run ahead
LINE = 16 + NUM_DIGESTS  # numbers of a rank, on cache lines that no other rank writes

SPIN_SECONDS = 0.001  # of a wait, while the next step is expected
IDLE_SECONDS = 1.0  # of a wait, after which sleeps are long
SHORT_SECONDS, LONG_SECONDS = 0.00005, 0.001  # of a sleep


class Place(IntEnum):
    """Says where a number lies in its rank's line, which that rank alone writes."""

    WRITTEN = 0  # bytes that rank 0 has put into the ring
    READ = 1  # bytes that the rank has taken out of it
    BEATS = 2  # grows while the process runs
    STAGE = 3  # how far its start is
    DIGESTS = 4  # how many steps it has digested
    MESSAGES = 5  # how many rank 0 has sent, or the rank has done what they say
    FIRST_DIGEST = 16


class Stage(IntEnum):
    LOADING = 0
    JOINING = 1  # it has the target's weights, and waits for all others to have theirs
    SERVING = 2  # or more: one more with each runner after the first


class Shared:
    """Maps the memory into one process.

    file: its descriptor, inherited by the other ranks, which nothing needs any more once all of
        them have mapped it
    """

    def __init__(self, file: int, num_ranks: int) -> None:
        self.file = file
        self.num_ranks = num_ranks
        num_bytes = 8 * LINE * num_ranks
        memory = memoryview(mmap.mmap(file, num_bytes + RING_BYTES))
        self._numbers = memory[:num_bytes].cast("Q")
        self.ring = memory[num_bytes:]

    @classmethod
    def of(cls, num_ranks: int) -> Self:
        """Make memory for so many ranks, all of it 0."""
        file = os.memfd_create("specdec-ranks")
        os.ftruncate(file, 8 * LINE * num_ranks + RING_BYTES)
        return cls(file, num_ranks)

    def get(self, rank: int, place: int) -> int:
        return self._numbers[rank * LINE + place]

    def set(self, rank: int, place: int, value: int) -> None:
        self._numbers[rank * LINE + place] = value


_lock = threading.Lock()


def fence() -> None:
    """Order what is written before it and after it, for processors that would not."""
    with _lock:
        pass


def wait_until(is_over: Callable[[], bool], check: Callable[[], object]) -> None:
    """Wait for another process, which a pipe would wake too slowly: spin, then sleep.

    check: called between sleeps; it may raise
    """
    began = time.monotonic()
    while not is_over():
        waited = time.monotonic() - began
        if waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            check()
            time.sleep(SHORT_SECONDS if waited < IDLE_SECONDS else LONG_SECONDS)
    fence()
