"""One thread that owns an engine: others send it commands, it sends them outputs as steps change their requests.

What a command raises reaches its caller alone. What a step raises ends the thread, and reaches everybody who waits and
every later call. While no request runs the thread sleeps.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from specdec.engine import Engine
from specdec.requests.intake import NewRequest
from specdec.requests.output import RequestOutput
from specdec.requests.request import Request

logger = logging.getLogger("specdec")

Answer = TypeVar("Answer")


class EngineDeadError(RuntimeError):
    """The engine takes no requests any more: it failed, which is this error's cause, or it was shut down."""


class Listener(Protocol):
    """Where a request's outputs go. Called in the engine's thread, so it may wait for nothing."""

    def take(self, output: RequestOutput) -> bool:
        """The request so far. False: nobody is there any more, which aborts it."""

    def fail(self, error: EngineDeadError) -> None:
        """There will be no further output."""


@dataclass(frozen=True, slots=True)
class Command(Generic[Answer]):
    """A call for the engine's thread. is_callers: what goes wrong concerns its caller and not the engine."""

    function: Callable[[], Answer]
    raises_to_caller: bool
    answer: Future[Answer]

    def run(self) -> None:
        """Call, unless the caller has lost interest, and answer."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.function())
        except Exception as error:
            self.answer.set_exception(error)
            if not self.raises_to_caller:
                raise

    def refuse(self, error: EngineDeadError) -> None:
        """Answer that nothing runs any more."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class EngineThread:
    """Starts at once. From then on nobody else may call the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Command[object] | None] = SimpleQueue()  # None: stop
        self._listeners: dict[str, Listener] = {}  # by request id, touched by the thread only
        # reentrant: the garbage collector may call close() from anywhere
        self._lock = threading.RLock()
        self._is_over = False  # under the lock: no command is queued behind the end
        self._cause: BaseException | None = None
        self._process = os.getpid()  # a forked child has no such thread
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        engine.owner = self._thread
        self._thread.start()

    def add(self, new: NewRequest, listener: Listener) -> Future[None]:
        """Queue a request that has an id; answered when it is checked. The listener hears of every change."""
        return self.call(partial(self._add, new, listener))

    def abort(self, request_id: str, listener: Listener | None = None) -> Future[bool]:
        """End a request; answers whether it ran. With a listener: only if the request is that listener's."""
        return self._send(partial(self._abort, request_id, listener), raises_to_caller=False)

    def call(self, function: Callable[[], Answer]) -> Future[Answer]:
        """Have anything called between two steps."""
        return self._send(function, raises_to_caller=True)

    def close(self) -> None:
        """Abort what runs, then end the thread and wait for that. Closing twice, or in a forked child, is nothing."""
        if self._process != os.getpid():
            return
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, function: Callable[[], Answer], raises_to_caller: bool) -> Future[Answer]:
        command = Command(function, raises_to_caller, Future[Answer]())
        if (
            self._process != os.getpid()
        ):  # before the lock, which another thread may have held in the fork
            command.refuse(self._forked_error())
            return command.answer
        with self._lock:
            if self._is_over:
                command.refuse(self._dead_error())
            else:
                self._commands.put(command)  # type: ignore[arg-type]
        return command.answer

    # the thread

    def _run(self) -> None:
        try:
            self._engine.runner.take_device()
            while self._run_commands():
                self._deliver(self._engine.step())
            self._deliver(self._engine.abort_all())
            self._engine.drain()
        except BaseException as error:
            logger.exception(
                "the engine has failed: requests that run are lost, and no others are taken"
            )
            self._end(error)
        else:
            self._end(None)

    def _run_commands(self) -> bool:
        """Do what others have asked for, and wait for it while nothing runs; False to stop."""
        while True:
            is_idle = not self._engine.has_unfinished
            if is_idle:
                self._engine.drain()  # frees what ended requests hold
            try:
                command = self._commands.get(block=is_idle)
            except Empty:
                return True
            if command is None:
                return False
            command.run()

    def _end(self, cause: BaseException | None) -> None:
        with self._lock:
            self._is_over, self._cause = True, cause
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(self._dead_error())
        for listener in self._listeners.values():
            listener.fail(self._dead_error())

    def _forked_error(self) -> EngineDeadError:
        return EngineDeadError(
            f"this AsyncLLM was built in process {self._process}, and a forked process ({os.getpid()}) has no copy of "
            "its thread: build one here, or start processes by multiprocessing's method spawn"
        )

    def _dead_error(self) -> EngineDeadError:
        """A new one for each who gets it, so that their tracebacks stay apart."""
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        error = EngineDeadError(
            f"the engine has failed: {type(self._cause).__name__}: {self._cause}"
        )
        error.__cause__ = self._cause
        return error

    def _add(self, new: NewRequest, listener: Listener) -> None:
        assert new.request_id is not None
        if new.request_id in self._listeners:
            raise ValueError(
                f"request_id {new.request_id!r} is already running: give each request an id of its own"
            )
        self._engine.add_requests([new])
        self._listeners[new.request_id] = listener

    def _abort(self, request_id: str, listener: Listener | None) -> bool:
        if request_id not in self._listeners or listener not in (None, self._listeners[request_id]):
            return False
        self._deliver(self._engine.abort(request_id))
        return True

    def _deliver(self, changed: Iterable[Request]) -> None:
        for request in {sample.request_id: sample for sample in changed}.values():
            listener = self._listeners[request.request_id]
            if request.is_finished:
                del self._listeners[request.request_id]
            is_heard = listener.take(_snapshot(request))
            if not is_heard and not request.is_finished:
                logger.info(
                    "request %s: its event loop is closed, so it is aborted", request.request_id
                )
                self._deliver(self._engine.abort(request.request_id))


def _snapshot(request: Request) -> RequestOutput:
    """An output whose statistics stay as they are while the request goes on."""
    output = request.output()
    stats = output.stats
    output.stats = replace(
        stats,
        num_drafted=list(stats.num_drafted),
        num_accepted=list(stats.num_accepted),
        rounds=list(stats.rounds),
    )
    return output
