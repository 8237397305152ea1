"""A ring of bytes: rank 0 writes messages, and every other rank reads all of them, in order.

A message has a number and its length in front. It may be longer than the ring: it is written piece
by piece as readers go on. A message that is lost or torn has a wrong number, which ends its reader.
"""

import struct
from collections.abc import Callable

from specdec.parallel.shared import RING_BYTES, Place, Shared, fence, wait_until

HEADER = struct.Struct("<QQ")  # number, bytes


def nothing() -> None:
    """Find nothing wrong while waiting."""


class Writer:
    """check: called while the ring is full; it may raise"""

    def __init__(self, shared: Shared, check: Callable[[], object] = nothing) -> None:
        self._shared = shared
        self._check = check
        self._written = 0
        self._number = 0

    def send(self, message: bytes) -> None:
        """Write a message. Waits only while a reader is a whole ring behind."""
        left = memoryview(HEADER.pack(self._number, len(message)) + message)
        self._number += 1
        while left:
            if self._room() == 0:
                wait_until(lambda: self._room() > 0, self._check)
            at = self._written % RING_BYTES
            size = min(len(left), self._room(), RING_BYTES - at)
            self._shared.ring[at : at + size] = left[:size]
            left = left[size:]
            self._written += size
            fence()
            self._shared.set(0, Place.WRITTEN, self._written)
        self._shared.set(0, Place.MESSAGES, self._number)

    def _room(self) -> int:
        readers = range(1, self._shared.num_ranks)
        slowest = min(self._shared.get(rank, Place.READ) for rank in readers)
        return RING_BYTES - (self._written - slowest)


class Reader:
    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._read = 0
        self._number = 0

    @property
    def has_message(self) -> bool:
        """Whether one has been sent that was not received."""
        return self._there() > 0

    def note_done(self) -> None:
        """Tell rank 0 that all was done that the last message says: now it is waited for."""
        self._shared.set(self._rank, Place.MESSAGES, self._number)

    def receive(self) -> bytes:
        """Wait for the next message, when all was done that the last one says.

        RuntimeError if it is not the one after the last.
        """
        self.note_done()
        number, size = HEADER.unpack(self._take(HEADER.size))
        if number != self._number:
            raise RuntimeError(f"message {self._number} of rank 0 is lost: {number} came instead")
        self._number += 1
        return self._take(size)

    def _take(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            if self._there() == 0:
                wait_until(lambda: self._there() > 0, nothing)
            at = self._read % RING_BYTES
            count = min(size - len(found), self._there(), RING_BYTES - at)
            fence()
            found += self._shared.ring[at : at + count]
            self._read += count
            fence()
            self._shared.set(self._rank, Place.READ, self._read)
        return bytes(found)

    def _there(self) -> int:
        return self._shared.get(0, Place.WRITTEN) - self._read
