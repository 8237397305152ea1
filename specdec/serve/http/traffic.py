"""What a server is doing: how many samples are in flight, and whether it takes more."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.serve.http.errors import SHUTTING_DOWN, ApiError


class Traffic:
    """For one event loop. most: samples that may run or wait."""

    def __init__(self, most: int) -> None:
        self.is_draining = False
        self.num_requests = 0  # from the first byte of each to the last of its answer
        self._num_samples = 0
        self._most = most
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """ApiError while the server is shutting down."""
        if self.is_draining:
            raise ApiError(503, SHUTTING_DOWN)
        self.num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self._is_idle.set()

    @contextmanager
    def samples(self, count: int) -> Iterator[None]:
        """ApiError if too many wait. A request of many samples is taken where one sample fits."""
        if self._num_samples >= self._most:
            waiting = f"{self._num_samples} samples are running or waiting"
            raise ApiError(429, f"{waiting}, at most {self._most} may: try again later")
        self._num_samples += count
        try:
            yield
        finally:
            self._num_samples -= count

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._is_idle.wait()
