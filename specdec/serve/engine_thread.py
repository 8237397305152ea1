"""A thread that owns an engine: it runs other threads' commands and delivers outputs to them.

An error in a command reaches its caller alone. An error in a step ends the thread and reaches every
waiting caller and every later call. While no request runs, the thread sleeps.

A step or a command that never ends is seen from outside by `silent_seconds`. Compiling a kernel is
progress, however long it takes; so is a processor's time on a CPU, where a step may take minutes.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from specdec.kernels import COMPILING
from specdec.llm import LLM
from specdec.requests.intake import NewRequest
from specdec.requests.metrics import Metric
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.request import Pieces, Request
from specdec.speculative_config import SpeculativeConfig

logger = logging.getLogger("specdec")

LEAST_SECONDS = 0.001  # of a processor between two looks, of a thread that computes

Answer = TypeVar("Answer")


class EngineDeadError(RuntimeError):
    """The engine takes no more requests: it failed (see __cause__) or was shut down."""


class EngineSilentError(EngineDeadError):
    """The engine makes no progress, or its process is stopped; it may go on."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the engine has made no progress or given no answer for {seconds:.0f} s")


# Receives what requests have gained in a step, as outputs of kind DELTA whose first alone has the
# prompt, or the error after which no more come. Called in the thread in which requests grow, so it
# must not wait. Returns the ids of requests that nobody reads: they are aborted.
Deliver = Callable[[list[RequestOutput] | EngineDeadError], Collection[str]]
Command = tuple[Callable[[], Any], Future[Any], bool]  # and whether its error ends the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Tells a server what it has to know of an engine before the first request.

    tokenizer: its directory. recommended: the checkpoint's own sampling.
    draft: its name, None without one. num_speculative_tokens: of a round, at most if is_adaptive.
    """

    max_num_seqs: int
    max_model_len: int
    tokenizer: Path
    recommended: SamplingParams
    draft: str | None
    num_speculative_tokens: int
    is_adaptive: bool

    @staticmethod
    def of(llm: LLM) -> "EngineFacts":
        return EngineFacts(
            max_num_seqs=llm.sizes.max_num_seqs,
            max_model_len=llm.sizes.max_model_len,
            tokenizer=llm.tokenizer.directory,
            recommended=llm.get_default_sampling_params(),
            draft=draft_name(llm.speculative_config),
            num_speculative_tokens=llm.sizes.num_speculative_tokens,
            is_adaptive=llm.sizes.is_adaptive,
        )


def draft_name(config: SpeculativeConfig | None) -> str | None:
    """Tell clients of a draft; of a directory its own name, not where it lies."""
    if config is None:
        return None
    name = str(config.model)
    return Path(name).name if os.path.isdir(os.path.expanduser(name)) else name


class EngineThread:
    """Starts at once. From then on no other thread may call the engine.

    deliver: to be set before the first request.
    """

    def __init__(self, llm: LLM) -> None:
        self.facts = EngineFacts.of(llm)
        self._engine = llm.engine
        self.deliver: Deliver = lambda news: ()
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: stop
        # by request id, touched by the thread only
        self._running: dict[str, Pieces] = {}
        # reentrant: the garbage collector may call close() from anywhere
        self._lock = threading.RLock()
        self._is_over = False  # under the lock: no command is queued after the end
        self._cause: BaseException | None = None
        self._owner = os.getpid()  # a forked child has no such thread
        self._progress_at = time.monotonic()  # of the thread itself; infinity while it is idle
        self._seen_at = 0.0  # of the last look that found it at work
        self._processor_seconds = 0.0  # of the thread, at that look
        self._grammars = ThreadPoolExecutor(max_workers=2)
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._engine.owner = self._thread
        self._thread.start()
        self._engine.watch_ranks(partial(self.call, self._engine.check_ranks, is_fatal=True))

    def add(self, new: NewRequest) -> Future[None]:
        """Queue a request whose id no other ever has; answered once checked."""
        return self.call(partial(self._add, new))

    def abort(self, request_id: str) -> Future[bool]:
        """End a request; answers whether it ran."""
        return self.call(partial(self._abort, request_id), is_fatal=True)

    def metrics(self) -> Future[list[Metric]]:
        return self.call(self._engine.metrics)

    def check_grammar(self, params: SamplingParams) -> Future[None]:
        """Compile the grammar of structured outputs, beside the thread."""
        if self._owner != os.getpid():
            return failed(self._dead_error())
        return self._grammars.submit(self._engine.intake.check_guide, params)

    def call(self, function: Callable[[], Answer], is_fatal: bool = False) -> Future[Answer]:
        """Run a function between two steps. is_fatal: its error ends the engine."""
        # before the lock, which another thread may have held during a fork
        if self._owner != os.getpid():
            return failed(self._dead_error())
        answer = Future[Answer]()
        with self._lock:
            if self._is_over:
                return failed(self._dead_error())
            self._commands.put((function, answer, is_fatal))
        return answer

    @property
    def is_running(self) -> bool:
        return not self._is_over and self._owner == os.getpid()

    @property
    def silent_seconds(self) -> float:
        """Tell for how long it has made no progress, although there is something to do."""
        if not self.is_running:  # a forked child has no thread to look at
            return 0.0
        with self._lock:  # without it the thread might end meanwhile
            if self._is_over:
                return 0.0
            if self._thread.ident in COMPILING or self._has_used_a_cpu():
                self._seen_at = time.monotonic()
        return max(time.monotonic() - max(self._progress_at, self._seen_at), 0.0)

    def _has_used_a_cpu(self) -> bool:
        """Tell whether it has since the last look. A CPU only: waiting for a GPU uses one too."""
        if self._engine.runner.device.type != "cpu" or self._thread.ident is None:
            return False
        now = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        has_used = now > self._processor_seconds + LEAST_SECONDS
        if has_used:
            self._processor_seconds = now
        return has_used

    def close(self) -> None:
        """Abort what runs, end the thread and wait for it. No effect twice or in a forked child."""
        if self._owner != os.getpid():
            return
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self) -> BaseException | None:
        """Wait for the end of the thread; return the error that has ended it."""
        self._thread.join()
        return self._cause

    # the thread

    def _run(self) -> None:
        try:
            self._engine.runner.take_device()
            while self._run_commands():
                self._deliver(self._engine.step())
            self._deliver(self._engine.abort_all())
            self._engine.drain()
        except BaseException as error:
            logger.exception("the engine has failed: running requests are lost, no more are taken")
            self._end_with_ranks(error)
        else:
            self._end_with_ranks(None)

    def _end_with_ranks(self, cause: BaseException | None) -> None:
        try:
            self._engine.end_ranks()
        finally:  # a device may be lost
            self._end(cause)

    def _run_commands(self) -> bool:
        """Run the queued commands, and wait for one while no request runs; False to stop."""
        while True:
            self._progress_at = time.monotonic()
            is_idle = not self._engine.has_unfinished
            if is_idle:
                self._engine.drain()  # releases what ended requests hold
                self._progress_at = math.inf
            try:
                command = self._commands.get(block=is_idle)
            except Empty:
                return True
            self._progress_at = time.monotonic()
            if command is None:
                return False
            _execute(*command)

    def _end(self, cause: BaseException | None) -> None:
        with self._lock:
            self._is_over = True
            self._cause = cause
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                settle(command[1], self._dead_error(), is_error=True)
        self.deliver(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        """Make a new error for each caller, so that their tracebacks stay apart."""
        if self._owner != os.getpid():
            return EngineDeadError(
                f"this AsyncLLM was built in process {self._owner}, and a forked process "
                f"({os.getpid()}) has no copy of its thread: build one here, or start processes by "
                "multiprocessing's method spawn"
            )
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        name = type(self._cause).__name__
        error = EngineDeadError(f"the engine has failed: {name}: {self._cause}")
        error.__cause__ = self._cause
        return error

    def _add(self, new: NewRequest) -> None:
        assert new.request_id is not None
        [request] = self._engine.add_requests([new])
        self._running[new.request_id] = Pieces(request)

    def _abort(self, request_id: str) -> bool:
        is_running = request_id in self._running
        if is_running:
            self._deliver(self._engine.abort(request_id))
        return is_running

    def _deliver(self, changed: Iterable[Request]) -> None:
        names = dict.fromkeys(sample.request_id for sample in changed)
        outputs = [self._running[name].output() for name in names]
        for output in outputs:
            if output.finished:
                del self._running[output.request_id]
        for name in self.deliver(outputs) if outputs else ():
            self.abort(name)


def _execute(function: Callable[[], object], answer: Future[Any], is_fatal: bool) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
        if is_fatal:
            raise


def settle(answer: Future[Any], value: Any, is_error: bool) -> None:
    """Answer, unless the caller has cancelled."""
    if answer.set_running_or_notify_cancel():
        (answer.set_exception if is_error else answer.set_result)(value)


def failed(error: Exception) -> Future[Any]:
    answer = Future[Any]()
    answer.set_exception(error)
    return answer
