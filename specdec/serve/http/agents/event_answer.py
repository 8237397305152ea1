"""An answer as the events of an agent's API, or as the object that they add up to.

A script writes them, one for each answer; it is given the same events of the text in both cases.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Send

from specdec.requests.output import CompletionOutput, RequestOutput
from specdec.serve.http.agents.events import Arguments, Call, Content, Event, Reasoning
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.answers import finish_reason
from specdec.serve.http.chats import ChatTurn
from specdec.serve.http.errors import ApiError, as_json, json_response
from specdec.serve.http.generating import (
    STREAM_HEADERS,
    Generation,
    Outputs,
    Services,
    send_event,
)

Kind = type[Content] | type[Reasoning] | type[Arguments]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts tokens. num_cached: of the prompt; num_reasoning: of the output."""

    num_prompt: int
    num_cached: int
    num_output: int
    num_reasoning: int = 0


class Script:
    """Writes an answer as events, objects with a `type` each, in order.

    Items follow one another: reasoning, text, a call. Each begins, grows by deltas and ends. A
    subclass says how events look. answer: all but its items, whose name is `field`.
    """

    def __init__(self, answer: Json, field: str) -> None:
        self.answer = answer
        self._field = field
        self.items: list[Json] = []
        self.kind: Kind | None = None  # of the item that grows
        self.text = ""  # of that item

    def begin(self, counts: Counts) -> Iterator[Json]:
        """Write what precedes the items."""
        raise NotImplementedError

    def begin_item(self, kind: Kind, name: str) -> Iterator[Json]:
        """Write that an item begins, and add it. name: of the tool of a call."""
        raise NotImplementedError

    def delta(self, kind: Kind, text: str) -> Json:
        """Write that the last item grows."""
        raise NotImplementedError

    def end_item(self, kind: Kind) -> Iterator[Json]:
        """Write that the last item is whole."""
        raise NotImplementedError

    def end(self, reason: str, stop: str | int | None, counts: Counts) -> Iterator[Json]:
        """Write what follows the last item. reason, stop: as of chat's answers."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> Iterator[Json]:
        """Write an error instead of the rest."""
        raise NotImplementedError

    def whole(self) -> Json:
        return {**self.answer, self._field: [dict(item) for item in self.items]}

    def write(self, event: Event) -> Iterator[Json]:
        """Write a part of the answer, in an item of its kind."""
        if isinstance(event, Call):
            yield from self.begin_next(Arguments, event.name)
            return
        kind = type(event)
        if kind is not self.kind:
            yield from self.begin_next(kind)
        self.text += event.text
        yield self.delta(kind, event.text)

    def begin_next(self, kind: Kind, name: str = "") -> Iterator[Json]:
        """End the item that grows, and begin the next."""
        yield from self.end_last()
        self.kind, self.text = kind, ""
        yield from self.begin_item(kind, name)

    def end_last(self) -> Iterator[Json]:
        if self.kind is not None:
            yield from self.end_item(self.kind)
        self.kind = None


class EventAnswer(Generation):
    """Answers by a script. headers: of the answer, beside its own."""

    def __init__(
        self, services: Services, turn: ChatTurn, script: Script, headers: Mapping[str, str]
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
        found: tuple[int, RequestOutput] | None = await anext(outputs)
        extra = [(name.encode(), value.encode()) for name, value in self._extra_headers.items()]
        headers = [*STREAM_HEADERS, *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self._script.begin(self._counts()))
        try:
            while found is not None:
                for piece in found[1].outputs:
                    await _send(send, await self._written(piece))
                found = await anext(outputs, None)
        except ApiError as error:
            await _send(send, self._script.fail(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _written(self, piece: CompletionOutput) -> list[Json]:
        """Return the script's events for a part of the text, and for its end."""
        events = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            events += self._reader.finish(is_cut=piece.finish_reason == "length")
        self._reasoning += "".join(each.text for each in events if isinstance(each, Reasoning))
        written = [each for event in events for each in self._script.write(event)]
        reason = finish_reason(piece.finish_reason, self._reader.num_calls > 0)
        if reason is not None:
            # encoded again, since nothing tells which tokens of the output the text came from
            encode = self._services.tokenizer.encode_word
            tokens = await asyncio.to_thread(encode, self._reasoning) if self._reasoning else []
            written += self._script.end(reason, piece.stop_reason, self._counts(len(tokens)))
        return written

    def _counts(self, num_reasoning: int = 0) -> Counts:
        output = self._so_far[0]
        return Counts(
            num_prompt=len(output.prompt_token_ids),
            num_cached=output.num_cached_tokens,
            num_output=sum(len(each.token_ids) for each in output.outputs),
            num_reasoning=num_reasoning,
        )


async def _send(send: Send, events: Iterable[Json]) -> None:
    for event in events:
        await send_event(send, as_json(event), str(event["type"]))
