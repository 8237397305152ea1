"""Requests go from any number of event loops to an engine that lives elsewhere.

A thread of this process (EngineThread) or a process of its own (EngineProcess) has the engine.
Nothing waits for an engine that makes no progress for long: EngineSilentError says so.
"""

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Self, TypeVar
from weakref import WeakValueDictionary

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
News = RequestOutput | EngineDeadError

SILENT_SECONDS = 10.0  # without progress, after which an engine is asked nothing
LOST_SECONDS = 60.0  # after which running requests end too: a stopped process may go on
ANSWER_SECONDS = 60.0  # for an answer of an engine that makes progress
LOOK_SECONDS = 1.0  # between two looks at its progress


class AsyncEngine:
    """Generates for asyncio. Once the host of the engine has ended, calls raise EngineDeadError."""

    def __init__(self, host: EngineThread | EngineProcess) -> None:
        self._host = host
        self._mailboxes = Mailboxes()
        host.deliver = self._mailboxes.deliver
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
        mailbox = Mailbox(request_id)
        params = SamplingParams() if sampling_params is None else sampling_params
        new = NewRequest(prompt=prompt, params=params, priority=priority, request_id=mailbox.id)
        kind = params.output_kind if isinstance(params, SamplingParams) else None  # refused below
        new = await self._prepared(new)
        whole: RequestOutput | None = None
        is_over = False
        self._mailboxes.add(mailbox)
        try:
            await self._answer(lambda: self._host.add(new))
            while not is_over:
                output = await self._next_output(mailbox)
                is_over = output.finished
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
            self._mailboxes.remove(mailbox)
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
        mailbox = self._mailboxes.named(request_id)
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


class Mailbox:
    """Carries what one request has gained to its reader, all in the reader's event loop.

    Outputs that were not fetched are joined: a slow reader loses nothing and is woken once.
    id: of the request in the engine, since its name may come again before the engine has ended it.
    """

    def __init__(self, name: str | None = None) -> None:
        self.id = uuid.uuid4().hex
        self.name = self.id if name is None else name
        self.loop = asyncio.get_running_loop()
        self._is_full = asyncio.Event()
        self._new: News | None = None

    async def get(self) -> RequestOutput:
        await self._is_full.wait()
        self._is_full.clear()
        new, self._new = self._new, None
        assert new is not None, "woken without an output"
        if isinstance(new, EngineDeadError):  # one for each, so that their tracebacks stay apart
            raise EngineDeadError(*new.args) from new.__cause__
        new.request_id = self.name
        return new

    def put(self, item: News) -> None:
        if not isinstance(self._new, RequestOutput):
            self._new = item
        elif isinstance(item, RequestOutput):
            self._new.add(item)
        elif not self._new.finished:
            self._new = item
        self._is_full.set()


Letter = tuple[Mailbox, News]


class Mailboxes:
    """Sorts what a host says of requests to the event loops of their readers."""

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[str, Mailbox] = WeakValueDictionary()

    def add(self, mailbox: Mailbox) -> None:
        """Add one; ValueError if its name is taken."""
        if mailbox.name != mailbox.id and self.named(mailbox.name) is not None:
            words = "is already running: give each request an id of its own"
            raise ValueError(f"request_id {mailbox.name!r} {words}")
        self._by_id[mailbox.id] = mailbox

    def named(self, name: str) -> Mailbox | None:
        return next((each for each in self._all() if each.name == name), None)

    def remove(self, mailbox: Mailbox) -> None:
        del self._by_id[mailbox.id]

    def deliver(self, news: list[RequestOutput] | EngineDeadError) -> list[str]:
        """Deliver, in any thread; return the ids of running requests that nobody reads.

        Waking a loop is a system call, which 32 requests a step would pay 32 times.
        """
        if isinstance(news, EngineDeadError):
            letters: list[Letter] = [(each, news) for each in self._all()]
            lost = []
        else:
            found = [(self._by_id.get(each.request_id), each) for each in news]
            letters = [(mailbox, each) for mailbox, each in found if mailbox is not None]
            lost = [each.request_id for mailbox, each in found if mailbox is None]
        by_loop: dict[asyncio.AbstractEventLoop, list[Letter]] = {}
        for letter in letters:
            by_loop.setdefault(letter[0].loop, []).append(letter)
        for loop, part in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, part)
            except RuntimeError:  # it is closed
                lost += [mailbox.id for mailbox, _ in part]
        return lost

    def _all(self) -> list[Mailbox]:
        found = (reference() for reference in self._by_id.valuerefs())
        return [each for each in found if each is not None]


def _put_all(letters: list[Letter]) -> None:
    for mailbox, item in letters:
        mailbox.put(item)


def _check_names(request_id: object, priority: object) -> None:
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r}: give a string, or None for one that is drawn")
    if not is_integer(priority):
        raise ValueError(f"priority={priority!r}: give an integer, lower goes first")
