"""How a conversation becomes text: the template and what it is given. Names are vLLM's.

Messages are checked here; template_worker.py says what a template does with them. A mark within
each special token that a user writes, put there before the template is rendered, tells them from
those of the template.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from specdec.arguments import check_bool, check_text
from specdec.requests import bounded_json

# messages: {"role": text, "content": text or a list of {"type": "text", "text": text}}
Message = Mapping[str, object]
Conversation = Sequence[Message]

MAX_TEMPLATE_BYTES = 1 << 20  # of a file; the longest known have some 20,000

CONTENT_FORMATS = ("auto", "string", "openai")
# names of the same part of a message; templates read the first two
REASONING = ("reasoning_content", "thinking", "reasoning")
WANTED = '{"role": text, "content": text or a list of {"type": "text", "text": text}}'

INVALID = "INVALID_JSON"  # the key of arguments that are no JSON object
MARK = "\ufdd0"  # Unicode keeps it for such uses: no text has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """ValueError names what is invalid.

    chat_template: Jinja text, a file of it, or the name of one of the tokenizer's; None: its own.
    chat_template_content_format: "string" joins the parts of a content by line breaks, "openai"
    passes parts to the template, and a text as one; "auto": a text as it is, and parts where the
    template reads each of them, else joined. add_generation_prompt: end with
    the beginning of an answer. continue_final_message: end within the last message. tools,
    documents: lists of dicts for the template. chat_template_kwargs: more variables for it.
    """

    chat_template: str | Path | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message=True with add_generation_prompt=True: a message cannot "
                "both go on and be followed by an answer; give add_generation_prompt=False"
            )
        if not isinstance(self.chat_template, str | Path | None):
            wanted = "Jinja text, a file of it, or None for the tokenizer's own"
            raise ValueError(f"chat_template={self.chat_template!r}: give {wanted}")
        if self.chat_template_content_format not in CONTENT_FORMATS:
            given = f"chat_template_content_format={self.chat_template_content_format!r}"
            raise ValueError(f"{given}: allowed are {', '.join(CONTENT_FORMATS)}")
        for name in ("tools", "documents"):
            given = getattr(self, name)
            are_dicts = isinstance(given, list | tuple) and all(
                isinstance(x, Mapping) for x in given
            )
            if given is not None and not are_dicts:
                raise ValueError(f"{name}={given!r}: give a list of dicts, or None")
        values = self.chat_template_kwargs
        if values is None:
            return
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ValueError(f"chat_template_kwargs={values!r}: give {{name: value}}")
        if own := sorted(set(values) & {*ChatFormat.__dataclass_fields__, "messages"}):
            raise ValueError(
                f"chat_template_kwargs={dict(values)!r}: {own[0]} has an argument of its own"
            )

    def template_text(self) -> str | None:
        """Return the given template: a file's text, if it names one."""
        given = self.chat_template
        if given is None or (isinstance(given, str) and any(sign in given for sign in "{}\n")):
            return None if given is None else str(given)
        if not os.path.isfile(given):
            return str(given)  # a name, perhaps
        if (size := os.path.getsize(given)) > MAX_TEMPLATE_BYTES:
            limit = f"at most {MAX_TEMPLATE_BYTES} are read"
            raise ValueError(f"chat_template={str(given)!r}: {size} bytes, {limit}")
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template={str(given)!r}: cannot be read: {error}") from error

    def variables(self, messages: Conversation) -> dict[str, object]:
        """Return what the template is given. ValueError for what is no conversation."""
        return {
            "messages": _checked_messages(messages),
            "tools": self.tools,
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt,
            **(self.chat_template_kwargs or {}),
        }

    def ended(self, text: str, messages: Conversation) -> str:
        """End the rendered text; with continue_final_message at the end of the last message."""
        if not self.continue_final_message:
            return text
        last = ["", *(_texts(messages[-1].get("content")) or [])][-1]
        content = last.strip()
        start = text.rfind(content)
        if not content or start < 0:
            raise ValueError(
                "continue_final_message=True, but the template does not write the last message's "
                "content as it is"
            )
        blanks = last[len(last.rstrip()) :]  # kept where the template keeps them
        end = start + len(content)
        return text[: end + len(blanks)] if text.startswith(blanks, end) else text[:end]


def _checked_messages(messages: object) -> list[dict[str, object]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r}: give a list of messages with role and content")
    for index, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        content = fields.get("content")
        if content is None and any(fields.get(name) for name in ("tool_calls", *REASONING)):
            content = ""
        texts = _texts(content)
        if not isinstance(fields.get("role"), str) or texts is None:
            raise ValueError(f"messages[{index}] is {message!r}: give {WANTED}")
        for text in (fields["role"], *texts):
            check_text(text)
    return [_as_templates_read(message) for message in messages]


def _texts(content: Any) -> list[str] | None:
    """Return the text of each part; None for what cannot be read, like a picture or a sound."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return None
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in content
    ]
    return texts if all(isinstance(text, str) for text in texts) else None


def _as_templates_read(message: Message) -> dict[str, object]:
    """Drop keys whose value is None, except the content, and add what templates read: the reasoning
    under each of its names, and arguments of tool calls in both forms.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    kept.setdefault("content", None)
    if calls := kept.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ValueError(f"tool_calls={calls!r}: give a list of calls")
        kept["tool_calls"] = [_with_object(call) for call in calls]
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning} | kept | {"reasoning_content": reasoning}


def _with_object(call: object) -> object:
    """Give a call its arguments in both forms, of which template_worker.py takes one: OpenAI sends
    them as text, most templates write an object as JSON.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ValueError(f'a tool call is {call!r}: give {{"function": {{"name": ..., ...}}}}')
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping):
        return call
    forms: dict[str, object] = {"object": arguments, "text": None}
    if isinstance(arguments, str):
        forms = {"object": arguments_object(arguments), "text": arguments or "{}"}
    return {**call, "function": {**function, "arguments": forms}}


def arguments_object(arguments: str) -> dict[str, object]:
    """Read a call's arguments. If a model wrote no JSON object, its text returns under one key."""
    try:
        found = bounded_json.loads(arguments or "{}", allows_nan=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {INVALID: arguments}


@dataclass(frozen=True, slots=True)
class MarkedText:
    """places: where marks were, in order."""

    text: str
    places: list[int]

    @staticmethod
    def of(rendered: str) -> "MarkedText":
        """Split off the marks of a rendered text."""
        *pieces, last = rendered.split(MARK)
        return MarkedText("".join([*pieces, last]), list(accumulate(map(len, pieces))))

    def is_marked(self, start: int, end: int) -> bool:
        index = bisect_right(self.places, start)
        return index < len(self.places) and self.places[index] < end


class SpecialMarks:
    """tokens: texts of special tokens. A single character has no room for a mark."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted((each for each in tokens if len(each) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {each[:end] for each in longest_first for end in range(1, len(each))}
        self._most = max(map(len, longest_first), default=1)

    def put(self, value: object) -> object:
        """Put a mark within each special token in the texts of a conversation's value."""
        match value:
            case str():
                return "".join(self._marked(value.replace(MARK, "")))
            case Mapping():
                return {self.put(key): self.put(each) for key, each in value.items()}
            case list() | tuple():
                return [self.put(each) for each in value]
        return value

    def _marked(self, text: str) -> Iterator[str]:
        """Mark a text in pieces; its end, too, where a token begins that another text may end."""
        start = 0
        while found := self._pattern.search(text, start):
            yield text[start : found.start() + 1] + MARK
            start = found.start() + 1  # others may overlap it
        yield text[start:]
        if any(text[-count:] in self._beginnings for count in range(1, self._most)):
            yield MARK
