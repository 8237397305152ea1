"""Answers are generated here, whole or as a stream; a client that leaves aborts its requests.

Everything runs while the answer is sent, so that there is one place that ends what was begun.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.requests.draft_spans import DraftSpans
from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineDeadError
from specdec.serve.http.answers import Form, Json, Part, has_token_fields, usage
from specdec.serve.http.api_request import ApiRequest
from specdec.serve.http.errors import SHUTTING_DOWN, ApiError, as_json, json_response
from specdec.serve.http.gate import Traffic
from specdec.serve.http.measures import Measures, Record, Timer
from specdec.serve.http.prompts import Encoded

logger = logging.getLogger("specdec.serve")
Outputs = AsyncIterator[tuple[int, RequestOutput]]  # what is new, with its prompt's position
STALLED = 60.0  # seconds without reading after which a client's answer ends
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Services:
    llm: AsyncEngine
    traffic: Traffic
    measures: Measures
    record: Record | None
    tokenizer: Tokenizer  # not the engine's


class Generation(Response):
    """Generates when it is called, as all responses of ASGI are. A subclass writes the answer."""

    def __init__(
        self, services: Services, api_request: ApiRequest, prompts: Sequence[Encoded]
    ) -> None:
        self._services = services
        self._api_request = api_request
        self._prompts = prompts
        self._so_far: dict[int, RequestOutput] = {}  # of each prompt, by position

    async def _whole(self, outputs: Outputs) -> Response:
        raise NotImplementedError

    async def _stream(self, outputs: Outputs, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. If the client leaves, what is generated for it is aborted."""
        work = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = len(self._prompts) * self._api_request.params.n
        with self._services.traffic.samples(count):
            async with aclosing(self._outputs()) as outputs:
                if self._api_request.is_stream:
                    try:
                        await self._stream(outputs, send)
                    except TimeoutError:
                        logger.info("a client did not read for %g s: its answer ends", STALLED)
                else:
                    response = await self._whole(outputs)
                    await response(scope, receive, send)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield what is new, and add it to `_so_far`; ApiError if a prompt has failed."""
        llm, api_request = self._services.llm, self._api_request
        generators = [
            llm.generate(prompt.for_engine(), api_request.params, priority=api_request.priority)
            for prompt in self._prompts
        ]
        timers = [Timer(self._services.measures) for _ in generators]
        try:
            async with aclosing(merged(generators)) as outputs:
                async for position, output in outputs:
                    if position in self._so_far:
                        self._so_far[position].add(output)
                    else:
                        self._so_far[position] = output.copy()
                    whole = self._so_far[position]
                    _raise_failure(whole, api_request)
                    timers[position].see(whole)
                    record = None if api_request.writes_nothing else self._services.record
                    if whole.finished and record is not None:
                        record.write(whole)
                    yield position, output
        except ValueError as error:  # the engine refuses a request
            raise ApiError(400, str(error)) from error
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from error


class Answer(Generation):
    """Answers in one of OpenAI's forms with choices."""

    def __init__(
        self, services: Services, api_request: ApiRequest, prompts: Sequence[Encoded], form: Form
    ) -> None:
        super().__init__(services, api_request, prompts)
        self._form = form
        self._heading: Json = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",  # none of the engine's
            "object": form.name,
            "created": int(time.time()),
            "model": api_request.model,
        }
        skips = api_request.params.skip_special_tokens
        shown = prompts if api_request.shows_drafts else ()
        self._drafts = [DraftSpans(services.tokenizer, skips) for _ in shown]

    async def _whole(self, outputs: Outputs) -> Response:
        async for _ in outputs:
            pass
        choices = [
            self._form.choice(await self._part(position, piece, is_first=True))
            for position, output in sorted(self._so_far.items())
            for piece in output.outputs
        ]
        return json_response({**self._heading, "choices": choices, "usage": self._usage()})

    async def _stream(self, outputs: Outputs, send: Send) -> None:
        """Send a stream; only an error before its first output has a status of its own."""
        first = await anext(outputs)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for chunk in self._chunks(first, outputs):
                await send_event(send, as_json(chunk))
        except ApiError as error:
            await send_event(send, as_json(error.body()))
        await send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(
        self, first: tuple[int, RequestOutput], outputs: Outputs
    ) -> AsyncGenerator[Json, None]:
        api_request = self._api_request
        heading = {**self._heading, "object": self._form.chunk_name}
        has_tokens = has_token_fields(api_request)
        begun: set[tuple[int, int]] = set()
        found: tuple[int, RequestOutput] | None = first
        while found is not None:
            position, output = found
            for piece in output.outputs:
                if not (piece.text or piece.finish_reason or (has_tokens and piece.token_ids)):
                    continue
                part = await self._part(position, piece, (position, piece.index) not in begun)
                begun.add((position, piece.index))
                extra: Json = {"usage": None} if api_request.includes_usage else {}
                if api_request.has_continuous_usage:
                    extra = {"usage": self._usage()}
                for choice in self._form.chunk_choices(part):
                    yield {**heading, "choices": [choice], **extra}
            found = await anext(outputs, None)
        if api_request.includes_usage:
            yield {**heading, "choices": [], "usage": self._usage()}

    def _usage(self) -> Json:
        return usage(list(self._so_far.values()), self._api_request)

    async def _part(self, position: int, piece: CompletionOutput, is_first: bool) -> Part:
        """Add what was drafted; a request that shows it has one sample for each prompt."""
        output = self._so_far[position]
        if not self._api_request.shows_drafts:
            return Part(position, output, piece, is_first)
        new = self._drafts[position].new
        is_over = piece.finish_reason is not None
        # in a thread: another one may hold the tokenizer for a long prompt
        rounds = await asyncio.to_thread(new, output.outputs[0], output.stats.rounds, is_over)
        return Part(position, output, piece, is_first, rounds)


async def merged(
    generators: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all generators as they come. Closing it closes them."""
    if len(generators) == 1:
        async with aclosing(generators[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    tasks = {asyncio.ensure_future(anext(each)): i for i, each in enumerate(generators)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                position = tasks.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                tasks[asyncio.ensure_future(anext(generators[position]))] = position
                yield position, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generator in generators:
            await generator.aclose()


async def _left(receive: Receive) -> None:
    """Wait until the client leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_event(send: Send, data: bytes, name: str | None = None) -> None:
    """Send an event; TimeoutError if the client does not read, and the answer ends."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    body = head + b"data: " + data + b"\n\n"
    async with asyncio.timeout(STALLED):
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _raise_failure(output: RequestOutput, api_request: ApiRequest) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            reason = str(completion.stop_reason)
            # a limit that the request's own grammar has met
            is_callers = bool(api_request.params.structured_outputs)
            status = 400 if is_callers and "structured_outputs" in reason else 500
            raise ApiError(status, reason)
        if completion.finish_reason == "abort":
            raise ApiError(503, SHUTTING_DOWN)
