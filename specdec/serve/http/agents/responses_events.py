"""The events of /v1/responses, as in types/responses of the openai package.

The items are reasoning, a message, a call. The first two have one part, with the text. All events
are numbered.
"""

import time
import uuid
from collections.abc import Iterator, Mapping

from specdec.serve.http.agents.event_answer import Counts, Kind, Script
from specdec.serve.http.agents.events import Arguments, Content, Reasoning
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.answers import new_call_id
from specdec.serve.http.errors import ApiError

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
NOT_DONE: Json = {"store": False, "service_tier": "default", "truncation": "disabled"}
# of each kind of item: the prefix of its id, its text's name in events, and how it begins
KINDS: dict[Kind, tuple[str, str, Json]] = {
    Content: ("msg", "output_text", {"type": "message", "role": "assistant"}),
    Reasoning: ("rs", "reasoning_text", {"type": "reasoning", "summary": []}),
    Arguments: ("fc", "function_call_arguments", {"type": "function_call"}),
}


class ResponsesScript(Script):
    """Writes a response. body: of the request. sampling: temperature and top_p, as they were."""

    def __init__(self, body: Mapping[str, object], model: str, sampling: Json) -> None:
        given = {name: body[name] for name in ECHOED if body.get(name) is not None}
        response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            **{**ECHOED, **given, **NOT_DONE},
            **sampling,
            "usage": None,
        }
        super().__init__(response, "output")
        self._count = 0

    def begin(self, counts: Counts) -> Iterator[Json]:
        yield self._event("created", response=dict(self.answer))
        yield self._event("in_progress", response=dict(self.answer))

    def begin_item(self, kind: Kind, name: str) -> Iterator[Json]:
        prefix, _, head = KINDS[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", **head}
        if kind is Arguments:
            item |= {"call_id": new_call_id(), "name": name, "arguments": ""}
        item["status"] = IN_PROGRESS
        if kind is not Arguments:
            item["content"] = []
        self.items.append(item)
        yield self._event("output_item.added", **self._index(), item=dict(item))
        if kind is not Arguments:
            yield self._event("content_part.added", **self._place(kind), part=_part(kind, ""))

    def delta(self, kind: Kind, text: str) -> Json:
        return self._text_event(kind, "delta", delta=text)

    def end_item(self, kind: Kind, status: str = COMPLETED) -> Iterator[Json]:
        item = self.items[-1]
        field = "arguments" if kind is Arguments else "text"
        yield self._text_event(kind, "done", **{field: self.text})
        if kind is Arguments:
            item["arguments"] = self.text
        else:
            part = _part(kind, self.text)
            item["content"] = [part]
            yield self._event("content_part.done", **self._place(kind), part=part)
        item["status"] = status
        yield self._event("output_item.done", **self._index(), item=dict(item))

    def end(self, reason: str, stop: str | int | None, counts: Counts) -> Iterator[Json]:
        """The response is completed, or cut by its limit. It has an item in any case."""
        if not self.items:
            yield from self.begin_next(Content)
        is_cut = reason == "length"
        status = INCOMPLETE if is_cut else COMPLETED
        if self.kind is not None:
            yield from self.end_item(self.kind, status)
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.answer |= {"status": status, "incomplete_details": details, "usage": _usage(counts)}
        if not is_cut:
            self.answer["completed_at"] = int(time.time())
        yield self._event(status, response=self.whole())

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The response has failed; what was done of it stays."""
        reason = {"code": "server_error", "message": error.message}
        self.answer |= {"status": "failed", "error": reason}
        yield self._event("failed", response=self.whole())

    def _index(self) -> Json:
        return {"output_index": len(self.items) - 1}

    def _place(self, kind: Kind) -> Json:
        place: Json = {"item_id": self.items[-1]["id"], **self._index()}
        return place if kind is Arguments else {**place, "content_index": 0}

    def _text_event(self, kind: Kind, what: str, **text: object) -> Json:
        logprobs: Json = {"logprobs": []} if kind is Content else {}
        return self._event(f"{KINDS[kind][1]}.{what}", **self._place(kind), **text, **logprobs)

    def _event(self, name: str, **fields: object) -> Json:
        self._count += 1
        return {"type": f"response.{name}", "sequence_number": self._count - 1, **fields}


def _part(kind: Kind, text: str) -> Json:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.num_prompt,
        "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
        "output_tokens": counts.num_output,
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
        "total_tokens": counts.num_prompt + counts.num_output,
    }
