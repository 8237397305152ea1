"""An engine in a process of its own: the side that asks. engine_worker.py is the other one.

Answers are written by the interpreter (text, JSON, HTTP), a part for each request and step; in the
engine's process it would take the time in which the next step is launched.
"""

import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from specdec.llm import LLM
from specdec.requests.intake import NewRequest
from specdec.requests.metrics import Metric
from specdec.requests.params import SamplingParams
from specdec.serve.engine_thread import Deliver, EngineDeadError, EngineFacts, failed, settle
from specdec.serve.worker_process import WorkerProcess
from specdec.speculative_config import SpeculativeConfig

logger = logging.getLogger("specdec")

BEAT_SECONDS = 1.0  # between two signs of life: for how long the engine's thread has been silent
CLOSING_SECONDS = 60.0  # for the step that runs, and to free what the engine has


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """Says what the process runs; all of it can be pickled.

    model, speculative_config, options: of LLM
    set_up: called first, for logging
    loaded: called with the LLM before it serves
    """

    model: str | Path
    speculative_config: SpeculativeConfig | Mapping[str, object] | None
    options: Mapping[str, object]
    set_up: Callable[[], object]
    loaded: Callable[[LLM], object]


class EngineProcess:
    """Loads, then serves; raises what loading raises. What it takes, EngineThread describes.

    worker: a process that has begun already. ChildProcessError if it ends while it loads.
    """

    def __init__(self, start: EngineStart, worker: WorkerProcess | None = None) -> None:
        self._lock = threading.RLock()
        self.deliver: Deliver = lambda news: ()
        self._calls: dict[int, Future[Any]] = {}  # by number in the pipe
        self._counter = itertools.count()
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._end: EngineDeadError | None = None
        self._owner = os.getpid()  # a forked child shares the pipe, and must not use it
        worker = worker or WorkerProcess()
        self._process, self._pipe = worker.process, worker.pipe
        try:
            self._pipe.send(start)
            self.facts: EngineFacts = self._loaded()
        except BaseException:  # Ctrl-C too
            self._kill()
            raise
        self._silent_seconds = 0.0  # at the last beat
        self._beat_at = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="specdec-outputs", daemon=True)
        self._sender = threading.Thread(target=self._send, name="specdec-calls", daemon=True)
        self._reader.start()
        self._sender.start()

    def _loaded(self) -> EngineFacts:
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            words = f"the engine's process ended with status {status} while it loaded"
            raise ChildProcessError(words) from None
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, EngineFacts)
        return found

    def add(self, new: NewRequest) -> Future[None]:
        return self.ask("add", new)

    def abort(self, request_id: str) -> Future[bool]:
        return self.ask("abort", request_id)

    def metrics(self) -> Future[list[Metric]]:
        return self.ask("metrics")

    def check_grammar(self, params: SamplingParams) -> Future[None]:
        return self.ask("check_grammar", params)

    def ask(self, name: str, *given: object) -> Future[Any]:
        """Have the other side do something: a method of its EngineThread."""
        if self._owner != os.getpid():  # before the lock: another thread may have held it
            return failed(self._dead_error())
        number, answer = next(self._counter), Future[Any]()
        message = bytes(ForkingPickler.dumps((number, name, given)))
        with self._lock:
            if self._end is not None:
                return failed(self._dead_error())
            self._calls[number] = answer
            self._outbox.put(message)
        return answer

    @property
    def is_running(self) -> bool:
        return self._end is None and self._owner == os.getpid()

    @property
    def silent_seconds(self) -> float:
        if not self.is_running:
            return 0.0
        return time.monotonic() - self._beat_at + self._silent_seconds

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        self._outbox.put(bytes(ForkingPickler.dumps(None)))
        # the garbage collector may call this from anywhere, and these two must go on
        if threading.current_thread() in (self._reader, self._sender):
            return
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the engine did not end within %g s and is killed", CLOSING_SECONDS)
            self._kill()
        self._reader.join()

    # the threads at the pipe

    def _send(self) -> None:
        """Send what is asked, in order: the pipe may be full, and callers must not wait."""
        with suppress(OSError):  # the process has ended: the reader answers
            while True:
                self._pipe.send_bytes(self._outbox.get())

    def _read(self) -> None:
        last = EngineDeadError("the engine was shut down")
        try:
            while True:
                found = self._pipe.recv()
                if isinstance(found, EngineDeadError):
                    last = found
                elif isinstance(found, float):
                    self._beat_at = time.monotonic()
                    self._silent_seconds = found
                elif isinstance(found, list):
                    for name in self.deliver(found):
                        self.abort(name)
                else:
                    self._answer(*found)
        except (EOFError, OSError):
            pass
        except BaseException as error:
            logger.exception("outputs of the engine cannot be read: running requests are lost")
            last = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            self._process.kill()
        status = self._process.wait()
        if status != 0 and not str(last).startswith("the engine has failed"):
            last = EngineDeadError(f"the engine's process ended with status {status}")
            logger.error("%s: running requests are lost, no more are taken", last)
        self._finish(last)

    def _answer(self, number: int, is_error: bool, value: Any) -> None:
        with self._lock:
            answer = self._calls.pop(number)
        settle(answer, value, is_error)

    def _finish(self, end: EngineDeadError) -> None:
        with self._lock:
            self._end = end
            calls, self._calls = self._calls, {}
            self._pipe.close()
        self._outbox.put(b"")  # wakes the sender, which finds the pipe closed
        for answer in calls.values():
            settle(answer, self._dead_error(), is_error=True)
        self.deliver(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        """Make a new error for each caller, so that their tracebacks stay apart."""
        if self._owner != os.getpid():
            return EngineDeadError(f"the engine belongs to process {self._owner}: build one here")
        return EngineDeadError(str(self._end))

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
