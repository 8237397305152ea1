"""The events of /v1/messages, as in types/ of the anthropic package.

Blocks follow one another: thinking, text, a use of a tool. Each starts, grows by deltas and stops,
between the start of the message and its stop.
"""

import uuid
from collections.abc import Iterator

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.agents.event_answer import Counts, Ending
from specdec.serve.http.agents.translation import Json
from specdec.serve.http.errors import ApiError
from specdec.serve.http.tools.events import Arguments, Call, Content, Event, Reasoning

# of each kind of block: its type, and the type and the field of its deltas
KINDS: dict[type[Event], tuple[str, str, str]] = {
    Content: ("text", "text_delta", "text"),
    Reasoning: ("thinking", "thinking_delta", "thinking"),
    Arguments: ("tool_use", "input_json_delta", "partial_json"),
}


class MessagesScript:
    """Of one message."""

    def __init__(self, model: str) -> None:
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._content: list[Json] = []
        self._kind: type[Event] | None = None  # of the block that grows
        self._text = ""

    def begin(self, counts: Counts) -> Iterator[Json]:
        """The message starts, with the tokens of its prompt."""
        self._message["usage"] = _usage(counts)
        yield {"type": "message_start", "message": dict(self._message)}

    def write(self, event: Event) -> Iterator[Json]:
        """A delta, in a block of its kind."""
        if isinstance(event, Call):
            yield from self._stop()
            block: Json = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}"}
            yield from self._start(Arguments, {**block, "name": event.name, "input": {}})
            return
        if type(event) is not self._kind:
            yield from self._stop()
            signature = {"signature": ""} if isinstance(event, Reasoning) else {}
            kind, _, field = KINDS[type(event)]
            yield from self._start(type(event), {"type": kind, field: "", **signature})
        self._text += event.text
        _, kind, field = KINDS[type(event)]
        delta = {"type": kind, field: event.text}
        yield {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def end(self, ending: Ending, counts: Counts) -> Iterator[Json]:
        """Why the message stops, and all its tokens."""
        yield from self._stop()
        reason, sequence = _stop_reason(ending)
        stop: Json = {"stop_reason": reason, "stop_sequence": sequence}
        self._message |= {**stop, "usage": _usage(counts)}
        yield {"type": "message_delta", "delta": stop, "usage": _usage(counts)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Json]:
        """An error in Anthropic's form."""
        yield error.anthropic_body()

    def whole(self) -> Json:
        """The message."""
        return {**self._message, "content": self._content}

    def _start(self, kind: type[Event], block: Json) -> Iterator[Json]:
        self._kind = kind
        self._text = ""
        self._content.append(block)
        index = len(self._content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _stop(self) -> Iterator[Json]:
        """The block that grows is whole. Arguments that are no JSON are shown as what they are."""
        if self._kind is None:
            return
        block = self._content[-1]
        if self._kind is Arguments:
            block["input"] = arguments_object(self._text)
        else:
            block[KINDS[self._kind][2]] = self._text
        self._kind = None
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _stop_reason(ending: Ending) -> tuple[str, str | None]:
    """And the stop sequence, if it is one."""
    if ending.finish_reason == "length":
        return "max_tokens", None
    if isinstance(ending.stop_reason, str):
        return "stop_sequence", ending.stop_reason
    return ("tool_use" if ending.has_calls else "end_turn"), None


def _usage(counts: Counts) -> Json:
    """input_tokens are those that were not found in the cache."""
    return {
        "input_tokens": counts.num_prompt - counts.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.num_cached,
        "output_tokens": counts.num_output,
        "output_tokens_details": {"thinking_tokens": counts.num_reasoning},
    }
