"""A server that ends in order: first it only refuses, then it closes.

After SIGTERM or Ctrl-C new requests get 503 while the listeners stay open, and running ones may
finish within the shutdown timeout. A second signal ends them at once. The exit code is 0, or 1 if
the engine had failed before.
"""

import asyncio
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from specdec.serve.async_engine import AsyncEngine
from specdec.serve.http.app import Application
from specdec.serve.http.connection import Connection
from specdec.serve.http.options import ServerOptions

logger = logging.getLogger("specdec.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections
SPARE_CONNECTIONS = 2048  # beside one for each sample that may run or wait
SPARE_FILES = 256  # beside one for each connection
MOST_FILES = 10_240  # where the system names no limit; macOS takes no larger one
CLOSING_SECONDS = 5  # to send the last answers, after their requests have ended


class Server(uvicorn.Server):
    """Serves an application until a signal or `drain`. announce: called when it listens."""

    def __init__(
        self, llm: AsyncEngine, options: ServerOptions, announce: Callable[[], None]
    ) -> None:
        self.application = Application(llm, options)
        self._llm = llm
        self._announce = announce
        self._shutdown_timeout = options.shutdown_timeout
        self._most_samples = llm.facts.max_num_seqs + options.max_waiting
        self._draining: asyncio.Task[None] | None = None
        self.has_lost_engine = False  # known at the first signal
        config = uvicorn.Config(
            self.application.app,
            http=Connection,
            log_config=None,
            log_level="warning",
            access_log=False,
            backlog=BACKLOG,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
            ws="none",
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so. Each connection is a file."""
        num_files = raise_file_limit()
        most = self._most_samples + SPARE_CONNECTIONS
        self.config.limit_concurrency = min(most, max(num_files - SPARE_FILES, num_files // 2))
        await super().startup(sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at a signal. uvicorn would raise it again at the end, for another exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.drain)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def drain(self) -> None:
        """Refuse new requests, in the event loop, and stop when the running ones have ended."""
        traffic = self.application.traffic
        timeout = 0.0 if traffic.is_draining else self._shutdown_timeout
        if not traffic.is_draining:  # from then on it may have been shut down
            self.has_lost_engine = not self._llm.is_running
        traffic.is_draining = True
        if self._draining is not None:
            self._draining.cancel()
        logger.info("stopping: %d running, at most %g s", traffic.num_requests, timeout)
        self._draining = asyncio.get_running_loop().create_task(self._drain(timeout))

    async def _drain(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.application.traffic.idle()
        except TimeoutError:
            logger.warning("%d requests are ended", self.application.traffic.num_requests)
        await asyncio.to_thread(self._llm.shutdown)
        self.should_exit = True


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
