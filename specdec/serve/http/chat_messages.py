"""An answer's reasoning, content and calls as a message of /v1/chat/completions, and its deltas."""

import uuid

from specdec.serve.http.agents.answer_reading import AnswerReading, Message
from specdec.serve.http.agents.events import Arguments, Call, Content, Event, Reasoning

Json = dict[str, object]


def chat_message(message: Message) -> Json:
    """The message. Content is null where there is something else instead."""
    others: Json = {}
    if message.reasoning:
        others |= _reasoning(message.reasoning)
    if message.calls:
        others["tool_calls"] = [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    content = None if others and not message.content else message.content
    return {"role": "assistant", "content": content, "refusal": None, **others}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """A text that ends by itself and has calls ends for them."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatDeltas:
    """Makes the deltas of one answer as a stream."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reader = reading.reader()
        self._is_plain = reading.is_plain
        self._is_begun = False

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._reader.num_calls > 0

    def new(self, text: str, reason: str | None, has_tokens: bool) -> list[Json]:
        """What more text adds, one kind of text in each; the first one says whose it is.

        reason: why the text is over, if it is.
        has_tokens: there is something to send along, even if the text is not certain yet.
        """
        events = self._reader.push(text)
        if reason is not None:
            events += self._reader.finish(is_cut=reason == "length")
        if self._is_plain and not events:
            events = [Content("")]
        deltas = [_delta(event) for event in events]
        if not deltas and (reason is not None or has_tokens):
            deltas = [{}]
        if deltas and not self._is_begun:
            self._is_begun = True
            deltas[0] = {"role": "assistant", **deltas[0]}
        return deltas


def _delta(event: Event) -> Json:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case Call(index, name):
            function = {"name": name, "arguments": ""}
            head: Json = {"index": index, "id": new_call_id(), "type": "function"}
            return {"tool_calls": [{**head, "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> Json:
    """Under vLLM's name and its earlier one, which other servers use."""
    return {"reasoning": text, "reasoning_content": text}
