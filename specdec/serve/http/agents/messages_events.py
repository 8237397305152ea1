"""The events of /v1/messages, as in types/ of the anthropic package.

The items are blocks: thinking, text, a use of a tool.
"""

import uuid
from collections.abc import Iterator

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.agents.event_answer import Counts, Kind, Script
from specdec.serve.http.agents.events import Arguments, Content, Reasoning
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.errors import ApiError

# of each kind of block: the field of its text, and the type and the field of its deltas
KINDS: dict[Kind, tuple[str, str, str]] = {
    Content: ("text", "text_delta", "text"),
    Reasoning: ("thinking", "thinking_delta", "thinking"),
    Arguments: ("input", "input_json_delta", "partial_json"),
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesScript(Script):
    """Writes a message."""

    def __init__(self, model: str) -> None:
        message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        super().__init__(message, "content")

    def begin(self, counts: Counts) -> Iterator[Json]:
        self.answer["usage"] = _usage(counts)
        yield {"type": "message_start", "message": dict(self.answer)}

    def begin_item(self, kind: Kind, name: str) -> Iterator[Json]:
        block: Json = {"type": KINDS[kind][0], KINDS[kind][0]: ""}
        if kind is Reasoning:
            block["signature"] = ""
        elif kind is Arguments:
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self.items.append(block)
        yield self._event("start", content_block=dict(block))

    def delta(self, kind: Kind, text: str) -> Json:
        _, name, field = KINDS[kind]
        return self._event("delta", delta={"type": name, field: text})

    def end_item(self, kind: Kind) -> Iterator[Json]:
        """End a block. Arguments that are no JSON are shown as what they are."""
        whole = arguments_object(self.text) if kind is Arguments else self.text
        self.items[-1][KINDS[kind][0]] = whole
        yield self._event("stop")

    def end(self, reason: str, stop: str | int | None, counts: Counts) -> Iterator[Json]:
        yield from self.end_last()
        ends: Json = {"stop_reason": REASONS[reason], "stop_sequence": None}
        if isinstance(stop, str) and reason != "length":
            ends = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        self.answer |= {**ends, "usage": _usage(counts)}
        yield {"type": "message_delta", "delta": ends, "usage": _usage(counts)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Json]:
        yield error.anthropic_body()

    def _event(self, what: str, **fields: object) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.items) - 1, **fields}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.num_prompt - counts.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.num_cached,
        "output_tokens": counts.num_output,
        "output_tokens_details": {"thinking_tokens": counts.num_reasoning},
    }
