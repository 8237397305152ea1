"""Requests go from any number of event loops to an engine that lives elsewhere.

A thread of this process (EngineThread) or a process of its own (EngineProcess) has the engine.
Nothing waits for an engine that makes no progress for long: EngineSilentError says so.
"""

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from specdec.arguments import is_integer
from specdec.requests.intake import NewRequest, Prompt
from specdec.requests.metrics import Metric
from specdec.requests.output import RequestOutput
from specdec.requests.params import RequestOutputKind, SamplingParams
from specdec.serve.engine_process import EngineProcess
from specdec.serve.engine_thread import (
    EngineDeadError,
    EngineFacts,
    EngineSilentError,
    EngineThread,
)

Found = TypeVar("Found")

SILENT_SECONDS = 10.0  # without progress, after which an engine is asked nothing
LOST_SECONDS = 60.0  # after which running requests end too: a stopped process may go on
ANSWER_SECONDS = 60.0  # for an answer of an engine that makes progress
LOOK_SECONDS = 1.0  # between two looks at its progress


class AsyncEngine:
    """Generates for asyncio. Once the host of the engine has ended, calls raise EngineDeadError."""

    def __init__(self, host: EngineThread | EngineProcess) -> None:
        self._host = host
        # by name; the engine has ids, since a name may come again before it has ended a request
        self._running: WeakValueDictionary[str, Mailbox] = WeakValueDictionary()
        self._wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, Waker] = WeakKeyDictionary()
        # at the latest when this object is collected or the interpreter exits
        weakref.finalize(self, host.close)

    @property
    def facts(self) -> EngineFacts:
        return self._host.facts

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of structured outputs, so that no step waits; ValueError if bad.

        GrammarsBusyError, which is one, if no new grammar is taken for the moment.
        """
        await self._answer(lambda: self._host.check_grammar(params))

    async def get_metrics(self) -> list[Metric]:
        """List counts since the start, and what runs now (specdec.requests.metrics)."""
        return await self._answer(self._host.metrics)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output as it grows, as output_kind says; the last one has finished=True.

        By default each output is whole. The request begins with the first iteration. A slow reader
        skips intermediate outputs, or with DELTA gets several as one, and never delays others.
        Leaving early (a break with aclose(), a cancelled task) aborts the request. request_id: for
        `abort`; None draws one. priority: lower goes first. ValueError says what is wrong with the
        request.
        """
        _check_names(request_id, priority)
        mailbox = Mailbox(self._waker())
        name = mailbox.id if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        new = NewRequest(prompt=prompt, params=params, priority=priority, request_id=mailbox.id)
        kind = params.output_kind if isinstance(params, SamplingParams) else None  # refused below
        new = await self._prepared(new)
        whole: RequestOutput | None = None
        is_over = False
        if self._running.setdefault(name, mailbox) is not mailbox:
            words = "is already running: give each request an id of its own"
            raise ValueError(f"request_id {name!r} {words}")
        try:
            await self._answer(lambda: self._host.add(new, mailbox.put))
            while not is_over:
                output = await self._next_output(mailbox)
                is_over = output.finished
                output.request_id = name
                whole = whole or output
                if kind is RequestOutputKind.DELTA:
                    output.prompt = whole.prompt
                    output.prompt_token_ids = whole.prompt_token_ids
                    yield output
                    continue
                if output is not whole:
                    whole.add(output)
                if is_over or kind is RequestOutputKind.CUMULATIVE:
                    yield whole.copy()
        finally:
            self._running.pop(name, None)
            if not is_over:
                self._host.abort(mailbox.id)

    async def _prepared(self, new: NewRequest) -> NewRequest:
        """Do beside the engine what may take long, and return the rest; ValueError if it is bad."""
        return new

    async def abort(self, request_id: str) -> bool:
        """End a request: its iterator gets a last output with finish_reason "abort".

        Returns False if no such request runs.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r}: give the string that names the request")
        mailbox = self._running.get(request_id)
        own = request_id if mailbox is None else mailbox.id
        return await self._answer(lambda: self._host.abort(own))

    async def _answer(self, ask: Callable[[], Future[Found]]) -> Found:
        """Wait for the engine's answer; EngineSilentError if it takes too long."""
        self._check_progress(SILENT_SECONDS)
        began = time.monotonic()
        answer = asyncio.wrap_future(ask())
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_SECONDS))[0]:
                self._check_progress(SILENT_SECONDS)
                if time.monotonic() - began > ANSWER_SECONDS:
                    raise EngineSilentError(time.monotonic() - began)
            return answer.result()
        finally:
            answer.cancel()

    async def _next_output(self, mailbox: "Mailbox") -> RequestOutput:
        while True:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    return await mailbox.get()
            except TimeoutError:  # it may wait for others
                self._check_progress(LOST_SECONDS)

    def _check_progress(self, most: float) -> None:
        seconds = self._host.silent_seconds
        if seconds > most:
            raise EngineSilentError(seconds)

    def _waker(self) -> "Waker":
        loop = asyncio.get_running_loop()
        return self._wakers.setdefault(loop, Waker(loop))

    @property
    def is_running(self) -> bool:
        """Tell whether the engine takes requests: it has neither failed nor been shut down."""
        return self._host.is_running

    @property
    def is_well(self) -> bool:
        """Tell whether it takes requests and has made progress lately, if there was work."""
        return self.is_running and self._host.silent_seconds <= SILENT_SECONDS

    def shutdown(self) -> None:
        """Abort what runs and end the thread, after its current step."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)


class Waker:
    """Wakes readers of one event loop: all whose outputs come before it has run, at once.

    Waking a loop from another thread is a system call, which 32 requests a step would pay 32 times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the key under which an AsyncLLM keeps this
        self._lock = threading.Lock()
        self._full: list[asyncio.Event] = []

    def wake(self, reader: asyncio.Event) -> bool:
        """Wake a reader, from any thread. False if the loop is closed."""
        with self._lock:
            is_scheduled = bool(self._full)
            self._full.append(reader)
        loop = self._loop()
        with suppress(RuntimeError):  # the loop is closed
            if loop is not None and not is_scheduled:
                loop.call_soon_threadsafe(self._deliver)
        return self.is_open

    @property
    def is_open(self) -> bool:
        """Tell whether the loop still runs what it is given."""
        loop = self._loop()
        return loop is not None and not loop.is_closed()

    def _deliver(self) -> None:
        with self._lock:
            full, self._full = self._full, []
        for reader in full:
            reader.set()


class Mailbox:
    """Carries what one request has gained from the engine's thread to an event loop.

    Outputs that were not fetched are joined: a slow reader loses nothing and is woken once.
    """

    def __init__(self, waker: Waker) -> None:
        self.id = uuid.uuid4().hex  # of its request in the engine
        self._waker = waker
        self._is_full = asyncio.Event()
        self._lock = threading.Lock()
        self._new: RequestOutput | EngineDeadError | None = None

    async def get(self) -> RequestOutput:
        await self._is_full.wait()
        self._is_full.clear()
        with self._lock:
            new, self._new = self._new, None
        assert new is not None, "woken without an output"
        if isinstance(new, EngineDeadError):
            raise new
        return new

    def put(self, item: RequestOutput | EngineDeadError) -> bool:
        """Add an output, in the thread in which a request grows. False if the loop is closed."""
        with self._lock:
            was_empty = self._new is None
            if isinstance(self._new, RequestOutput) and isinstance(item, RequestOutput):
                self._new.add(item)
            else:
                self._new = item
        if not was_empty:  # the reader is being woken already, if its loop is open
            return self._waker.is_open
        return self._waker.wake(self._is_full)


def _check_names(request_id: object, priority: object) -> None:
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r}: give a string, or None for one that is drawn")
    if not is_integer(priority):
        raise ValueError(f"priority={priority!r}: give an integer, lower goes first")
