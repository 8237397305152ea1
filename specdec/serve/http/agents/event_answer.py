"""An answer as the events of an agent's API, or as the object that they add up to.

A script writes them, one for each answer; it is given the same events of the text in both cases.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Send

from specdec.requests.output import CompletionOutput
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.answers import usage
from specdec.serve.http.chats import ChatTurn
from specdec.serve.http.errors import ApiError, as_json, json_response
from specdec.serve.http.generating import (
    STREAM_HEADERS,
    Generation,
    Outputs,
    Services,
    send_event,
)
from specdec.serve.http.tools.events import Event, Reasoning


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts tokens. num_cached: of the prompt; num_reasoning: of the output."""

    num_prompt: int
    num_cached: int
    num_output: int
    num_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """finish_reason: the engine's; stop_reason: the string that ended the text, if one did."""

    finish_reason: str
    stop_reason: str | int | None
    has_calls: bool


class Script(Protocol):
    """Writes events, objects with a `type` each, in order."""

    def begin(self, counts: Counts) -> Iterator[Json]:
        """Write what precedes the text."""

    def write(self, event: Event) -> Iterator[Json]:
        """Write a part of the text."""

    def end(self, ending: Ending, counts: Counts) -> Iterator[Json]:
        """Write what follows the text."""

    def fail(self, error: ApiError) -> Iterator[Json]:
        """Write an error instead of the rest."""

    def whole(self) -> Json:
        """Return the whole answer, after its end."""


class EventAnswer(Generation):
    """Answers by a script. headers: of the answer, beside its own."""

    def __init__(
        self,
        services: Services,
        turn: ChatTurn,
        script: Script,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(services, turn.api_request, [turn.prompt])
        self._script = script
        self._extra_headers = headers
        self._reader = turn.reading.reader()
        self._reasoning = ""

    async def _whole(self, outputs: Outputs) -> Response:
        async for _ in outputs:
            pass
        list(self._script.begin(self._counts()))
        await self._written(self._so_far[0].outputs[0])
        return json_response(self._script.whole(), headers=self._extra_headers)

    async def _stream(self, outputs: Outputs, send: Send) -> None:
        """An error before the first output has a status of its own; later ones are events."""
        _, output = await anext(outputs)
        extra = [(name.encode(), value.encode()) for name, value in self._extra_headers.items()]
        headers = [*STREAM_HEADERS, *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, list(self._script.begin(self._counts())))
        try:
            while True:
                for piece in output.outputs:
                    await self._send(send, await self._written(piece))
                _, output = await anext(outputs)
        except StopAsyncIteration:
            pass
        except ApiError as error:
            await self._send(send, list(self._script.fail(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _written(self, piece: CompletionOutput) -> list[Json]:
        """Return the script's events for a part of the text, and for its end."""
        events = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            events += self._reader.finish(is_cut=piece.finish_reason == "length")
        self._reasoning += "".join(each.text for each in events if isinstance(each, Reasoning))
        written = [each for event in events for each in self._script.write(event)]
        if piece.finish_reason is not None:
            has_calls = self._reader.num_calls > 0
            ending = Ending(piece.finish_reason, piece.stop_reason, has_calls)
            counts = self._counts(await self._num_reasoning())
            written += self._script.end(ending, counts)
        return written

    async def _num_reasoning(self) -> int:
        """Count tokens of the text, since nothing tells which tokens of the output it came from."""
        encode = self._services.tokenizer.encode_word
        return len(await asyncio.to_thread(encode, self._reasoning)) if self._reasoning else 0

    def _counts(self, num_reasoning: int = 0) -> Counts:
        output = self._so_far[0]
        counts = usage([output], self._api_request)
        details = counts["prompt_tokens_details"]
        assert isinstance(details, dict)
        return Counts(
            num_prompt=len(output.prompt_token_ids),
            num_cached=details["cached_tokens"],
            num_output=sum(len(each.token_ids) for each in output.outputs),
            num_reasoning=num_reasoning,
        )

    async def _send(self, send: Send, events: list[Json]) -> None:
        for event in events:
            await send_event(send, as_json(event), str(event["type"]))
