"""The process that has a server's engine: the side that answers. engine_process.py starts it.

It ends when it is told to, when the process that started it has ended, and when the engine fails.
What goes through the pipe is pickled, by these two processes alone: no file or client is read so.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any

from specdec.llm import LLM
from specdec.requests.output import RequestOutput
from specdec.serve.engine_process import BEAT_SECONDS, CLOSING_SECONDS, EngineStart
from specdec.serve.engine_thread import EngineDeadError, EngineFacts, EngineThread

logger = logging.getLogger("specdec")

Message = list[RequestOutput] | tuple[int, bool, Any] | EngineDeadError | float
FAILED = 1  # exit status
# The pipe says when to end: a service manager may signal both processes, and only the other one
# ends in order. A terminal may stop a background process that writes to it.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU)


def main() -> None:
    """Run with the number of the pipe's file as the only argument."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    try:
        start: EngineStart = pipe.recv()
    except (EOFError, OSError):  # the other process ended before it asked for anything
        raise SystemExit(FAILED) from None
    is_loaded = threading.Event()
    threading.Thread(target=_watch, args=(pipe, is_loaded), daemon=True).start()
    start.set_up()
    try:
        llm = LLM(start.model, start.speculative_config, **start.options)  # type: ignore[arg-type]
        # a collection that walks over modules takes 0.05 s or more, and all requests wait for it
        gc.collect()
        gc.freeze()
        start.loaded(llm)
        found: EngineFacts | BaseException = EngineFacts.of(llm)
    except Exception as error:
        found = _sendable(error)
        found.add_note(f"in the engine's process:\n{traceback.format_exc()}")
    is_loaded.set()
    pipe.send(found)
    status = FAILED if isinstance(found, BaseException) else Worker(llm, pipe).run()
    sys.stderr.flush()
    os._exit(status)  # a thread may wait for the pipe; nothing is left to write


def _watch(pipe: Connection, is_loaded: threading.Event) -> None:
    """End if the other process ends meanwhile: it sends nothing before the engine is loaded."""
    while not is_loaded.is_set():
        if pipe.poll(0.2) and not is_loaded.is_set():
            os._exit(FAILED)


class Worker:
    """Runs one engine. The other side may call the public methods of its thread."""

    def __init__(self, llm: LLM, pipe: Connection) -> None:
        self._tokenizer = llm.tokenizer
        self._pipe = pipe
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()  # None: nothing more comes
        self._engine = EngineThread(llm)
        self._engine.deliver = self._post
        self._beat_at = time.monotonic()  # the next one

    def run(self) -> int:
        """Serve until the end; return the exit status."""
        threading.Thread(target=_or_end, args=(self._read,), daemon=True).start()
        sender = threading.Thread(target=_or_end, args=(self._send,), daemon=True)
        sender.start()
        cause = self._engine.wait()
        self._outbox.put(None)
        sender.join()
        self._tokenizer.close()
        return 0 if cause is None else FAILED

    def _post(self, news: list[RequestOutput] | EngineDeadError) -> tuple[()]:
        self._outbox.put(news)
        return ()

    def _send(self) -> None:
        """Send what waits in the outbox, until nothing more comes or nobody reads."""
        try:
            while (message := self._next()) is not None:
                self._pipe.send(message)
        except OSError:  # the other process has ended
            pass
        finally:
            self._pipe.close()

    def _next(self) -> Message | None:
        """Wait for a message in the outbox, or until it is time for a beat."""
        left = self._beat_at - time.monotonic()
        if left > 0:
            with suppress(Empty):
                return self._outbox.get(timeout=left)
        self._beat_at = time.monotonic() + BEAT_SECONDS
        return self._engine.silent_seconds

    def _read(self) -> None:
        try:
            while (call := self._pipe.recv()) is not None:
                self._call(*call)
        except (EOFError, OSError):
            logger.warning("the server has ended, and the engine with it")
            ending = threading.Timer(CLOSING_SECONDS, os._exit, [FAILED])  # a step may hang
            ending.daemon = True
            ending.start()
        self._engine.close()

    def _call(self, number: int, name: str, given: tuple[Any, ...]) -> None:
        answer: Future[Any] = getattr(self._engine, name)(*given)
        answer.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            self._outbox.put((number, False, answer.result()))
        else:
            self._outbox.put((number, True, _sendable(error)))


def _or_end(function: Callable[[], None]) -> None:
    """Run a thread's work. If it fails, the process ends: it would be of no use."""
    try:
        function()
    except BaseException:
        logger.exception("the engine's process cannot use its pipe, and ends")
        os._exit(FAILED)


def _sendable(error: BaseException) -> BaseException:
    """Return an error that the other side can read: another one with its words if need be."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        for kind in (ValueError, OSError):
            if isinstance(error, kind):
                return kind(str(error))
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
