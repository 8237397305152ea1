"""The events of /v1/responses, as in types/responses of the openai package.

Items of the output follow one another: reasoning, a message, a call. Each is added, grows by
deltas and is done, and so are its parts; the response is created, in progress, and completed,
incomplete or failed. All events are numbered.
"""

import time
import uuid
from collections.abc import Iterator, Mapping

from specdec.serve.http.agents.event_answer import Counts, Ending
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.chat_messages import new_call_id
from specdec.serve.http.errors import ApiError
from specdec.serve.http.tools.events import Arguments, Call, Content, Event, Reasoning

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
ECHOED: Json = {  # fields of a request, and what they are without one
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
# which events the text of an item has
KINDS: dict[type[Event], tuple[str, str]] = {
    Content: ("output_text", "text"),
    Reasoning: ("reasoning_text", "text"),
    Arguments: ("function_call_arguments", "arguments"),
}


class ResponsesScript:
    """body: of the request. sampling: temperature and top_p, as they were."""

    def __init__(self, body: Mapping[str, object], model: str, sampling: Json) -> None:
        given = {name: body[name] for name in ECHOED if body.get(name) is not None}
        # what is asked for and not done
        given |= {"store": False, "service_tier": "default", "truncation": "disabled"}
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            **{**ECHOED, **given},
            **sampling,
            "usage": None,
        }
        self._output: list[Json] = []
        self._kind: type[Event] | None = None  # of the item that grows
        self._text = ""
        self._count = 0

    def begin(self, counts: Counts) -> Iterator[Json]:
        """The response is created."""
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def write(self, event: Event) -> Iterator[Json]:
        """A delta, in an item of its kind."""
        if isinstance(event, Call):
            yield from self._done()
            yield from self._add(Arguments, _call(event.name))
            return
        if type(event) is not self._kind:
            yield from self._done()
            yield from self._add(type(event), _item(event))
        self._text += event.text
        name, _ = KINDS[type(event)]
        extra: Json = {"logprobs": []} if isinstance(event, Content) else {}
        yield self._event(f"response.{name}.delta", **self._place(), delta=event.text, **extra)

    def end(self, ending: Ending, counts: Counts) -> Iterator[Json]:
        """The response is completed, or cut by its limit. It has an item in any case."""
        status = INCOMPLETE if ending.finish_reason == "length" else COMPLETED
        if not self._output:
            yield from self._add(Content, _item(Content("")))
        yield from self._done(status)
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        self._response |= {"status": status, "incomplete_details": details, "usage": _usage(counts)}
        if status == COMPLETED:
            self._response["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self.whole())

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The response has failed; what was done of it stays."""
        self._response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
        }
        yield self._event("response.failed", response=self.whole())

    def whole(self) -> Json:
        """The response."""
        return {**self._response, "output": [dict(item) for item in self._output]}

    def _add(self, kind: type[Event], item: Json) -> Iterator[Json]:
        self._kind = kind
        self._text = ""
        self._output.append(item)
        position = {"output_index": len(self._output) - 1}
        yield self._event("response.output_item.added", **position, item=dict(item))
        if kind is not Arguments:
            part = _part(kind, "")
            yield self._event("response.content_part.added", **self._place(), part=part)

    def _done(self, status: str = COMPLETED) -> Iterator[Json]:
        """The item that grows is whole."""
        if self._kind is None:
            return
        kind = self._kind
        name, field = KINDS[kind]
        extra: Json = {"logprobs": []} if kind is Content else {}
        item = self._output[-1]
        if kind is Arguments:
            item["arguments"] = self._text
        else:
            item["content"] = [_part(kind, self._text)]
        item["status"] = status
        text: Json = {field: self._text}
        yield self._event(f"response.{name}.done", **self._place(), **text, **extra)
        if kind is not Arguments:
            part = _part(kind, self._text)
            yield self._event("response.content_part.done", **self._place(), part=part)
        position = {"output_index": len(self._output) - 1}
        yield self._event("response.output_item.done", **position, item=dict(item))
        self._kind = None

    def _place(self) -> Json:
        place: Json = {
            "item_id": self._output[-1]["id"],
            "output_index": len(self._output) - 1,
        }
        return place if self._kind is Arguments else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> Json:
        number = self._count
        self._count += 1
        return {"type": kind, "sequence_number": number, **fields}


def _item(event: Event) -> Json:
    """An item of text, empty."""
    if isinstance(event, Reasoning):
        head: Json = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
    else:
        head = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
    return {**head, "status": IN_PROGRESS, "content": []}


def _call(name: str) -> Json:
    return {
        "id": _new_id("fc"),
        "type": "function_call",
        "call_id": new_call_id(),
        "name": name,
        "arguments": "",
        "status": IN_PROGRESS,
    }


def _part(kind: type[Event], text: str) -> Json:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.num_prompt,
        "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
        "output_tokens": counts.num_output,
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
        "total_tokens": counts.num_prompt + counts.num_output,
    }
