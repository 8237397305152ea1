"""A request of an agent's API in the fields of /v1/chat/completions.

Agents send fields that this server has never heard of, more of them with each version. On these
routes what is unknown, or has no effect here, is ignored; the answer and the log name it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from specdec.serve.http.errors import ApiError
from specdec.serve.http.fields import FIELDS, known_fields

Json = dict[str, object]
Knows = Callable[[str], bool]  # whether the chat template reads a variable
Type = TypeVar("Type")

REFERENCE = "tool_reference"
IGNORED_HEADER = "X-Specdec-Ignored"
MOST_NAMED = 32  # in a header
MOST_IGNORED = 256  # of one request
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(slots=True)
class Translation:
    """Holds a request in chat's fields.

    names: of chat's fields on this route, for errors. body: known fields of /v1/chat/completions.
    """

    names: Mapping[str, str]
    knows: Knows
    body: Json = field(default_factory=dict)
    _ignored: dict[str, None] = field(default_factory=dict)  # an ordered set

    @property
    def ignored(self) -> list[str]:
        """Name what has no effect: each once, in the order of the request."""
        return list(self._ignored)

    def take(self, route: str, body: Mapping[str, object]) -> Json:
        """Pass on the fields that chat has under the same name; return those to be translated."""
        known = known_fields(route, body, self.ignore)
        self.body |= {name: known.pop(name) for name in list(known) if FIELDS[route][name].is_chats}
        return known

    def ignore(self, name: str) -> None:
        """Note a name, unless there are many: the caller chooses how many there are."""
        if len(self._ignored) < MOST_IGNORED:
            self._ignored[name if NAME.fullmatch(name) else "(a strange name)"] = None

    def take_effort(self, effort: object, name: str) -> None:
        """Pass on how much to reason, where the template can be told."""
        if self.knows("reasoning_effort") or self.knows("enable_thinking"):
            self.body |= {} if effort is None else {"reasoning_effort": effort}
        elif effort is not None:
            self.ignore(name)

    def headers(self) -> dict[str, str]:
        named = ", ".join(islice(self._ignored, MOST_NAMED))
        return {IGNORED_HEADER: named} if named else {}

    def renamed(self, error: ApiError) -> ApiError:
        """Rename the field of an error to what it is called on this route."""
        old = error.param or ""
        name = self.names.get(old)
        if name is None:
            return error
        rest = error.message.removeprefix(old)
        message = error.message if rest == error.message else name + rest
        return ApiError(error.status, message, name, error.code)


def checked(value: object, kind: type[Type], place: str, wanted: str) -> Type:
    """Return a value that must have this type; ApiError says what is wanted instead."""
    if not isinstance(value, kind):
        raise ApiError(400, f"{place}={value!r:.200}: give {wanted}")
    return value


def text_in(item: Mapping[str, object], name: str, place: str) -> str:
    return checked(item.get(name), str, f"{place}.{name}", "text")


def texts_of(content: object, place: str, kinds: Collection[str]) -> list[str]:
    """Read the texts of a content, which may be parts of these kinds. ApiError for pictures."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [content]
    parts: list[object] = checked(content, list, place, "text or a list of parts")
    return [text_of(part, f"{place}[{i}]", kinds) for i, part in enumerate(parts)]


def text_of(part: object, place: str, kinds: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in kinds:
        raise ApiError(400, f"{place}: type {kind!r:.100} given, read are {', '.join(kinds)}")
    if kind == REFERENCE:  # it reads as the name of its tool
        return text_in(part, "tool_name", place)
    text = part.get("refusal" if kind == "refusal" else "text")
    return checked(text, str, f"{place}: text", "text")


def content_of(texts: list[str]) -> object:
    """Make the content of a chat message: parts, where there are several."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def call_of(item: Mapping[str, object], id_name: str, arguments: str, place: str) -> Json:
    call_id, name = text_in(item, id_name, place), text_in(item, "name", place)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def with_one_system(messages: list[Json]) -> list[Json]:
    """Join the system's first messages, since many templates take no second one."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    joined = "\n\n".join(
        text if isinstance(text, str) else "\n".join(str(part["text"]) for part in text)  # type: ignore[attr-defined]
        for text in (each["content"] for each in messages[:count])
    )
    return [{"role": "system", "content": joined}, *messages[count:]]
