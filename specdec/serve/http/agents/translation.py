"""A request of an agent's API in the fields of /v1/chat/completions.

Agents send fields that this server has never heard of, more of them with each version. On these
routes what is unknown, or has no effect here, is ignored; the answer and the log name it.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.errors import ApiError
from specdec.serve.http.fields import FIELDS, known_fields

logger = logging.getLogger("specdec.serve")

Json = dict[str, object]
Knows = Callable[[str], bool]  # whether the chat template reads a variable

IGNORED_HEADER = "X-Specdec-Ignored"
MOST_NAMED = 32  # in a header
MOST_IGNORED = 256  # of one request
MOST_LOGGED = 1000  # of all requests
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(slots=True)
class Translation:
    """Holds a request in chat's fields.

    body: known fields of /v1/chat/completions. ignored: names of what has no effect.

    names: of chat's fields on this route, for errors.
    """

    names: Mapping[str, str]
    body: Json = field(default_factory=dict)
    _ignored: dict[str, None] = field(default_factory=dict)  # an ordered set

    @property
    def ignored(self) -> list[str]:
        """Name each once, in the order of the request."""
        return list(self._ignored)

    def take(self, route: str, body: Mapping[str, object]) -> Json:
        """Pass on the fields that chat has under the same name; return those to be translated."""
        known = known_fields(route, body, self.ignore)
        passed = {name for name in known if FIELDS[route][name].is_chats}
        self.body |= {name: value for name, value in known.items() if name in passed}
        return {name: value for name, value in known.items() if name not in passed}

    def ignore(self, name: str) -> None:
        """Note a name, unless there are many: the caller chooses how many there are."""
        if len(self._ignored) < MOST_IGNORED:
            self._ignored[name if NAME.fullmatch(name) else "(a strange name)"] = None

    def take_effort(self, effort: object, name: str, knows: Knows) -> None:
        """Pass on how much to reason, where the template can be told."""
        if effort is None:
            return
        if knows("reasoning_effort") or knows("enable_thinking"):
            self.body["reasoning_effort"] = effort
        else:
            self.ignore(name)

    def headers(self) -> dict[str, str]:
        """Make the headers of the answer."""
        named = ", ".join(islice(self._ignored, MOST_NAMED))
        return {IGNORED_HEADER: named} if named else {}

    def renamed(self, error: ApiError) -> ApiError:
        """Rename the field of an error to what it is called on this route."""
        name = self.names.get(error.param or "")
        if name is None:
            return error
        old = str(error.param)
        message = error.message
        if message.startswith(old):
            message = name + message.removeprefix(old)
        return ApiError(error.status, message, name, error.code)


class Announced:
    """Logs each ignored name once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def see(self, path: str, names: Collection[str]) -> None:
        """Log the names that are new in a request."""
        new = [name for name in names if name not in self._names]
        if new and len(self._names) < MOST_LOGGED:
            self._names.update(new)
            logger.info("%s: ignored %s (each is named once)", path, ", ".join(new))


def arguments_text(arguments: str) -> str:
    """Write arguments as a JSON object: a model that wrote none gets them back as a text."""
    return json.dumps(arguments_object(arguments), ensure_ascii=False)


def texts_of(content: object, place: str, kinds: Collection[str]) -> list[str]:
    """Read the texts of a content, which may be parts of these kinds. ApiError for pictures."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}={content!r:.200}: give text or a list of parts")
    return [text_of(part, f"{place}[{i}]", kinds) for i, part in enumerate(content)]


def text_of(part: object, place: str, kinds: Collection[str]) -> str:
    """Read the text of one part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in kinds:
        raise ApiError(400, f"{place}: type {kind!r:.100} given, read are {', '.join(kinds)}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ApiError(400, f"{place}: text={text!r:.200}: give text")
    return text


def content_of(texts: list[str]) -> object:
    """Make the content of a chat message: parts, where there are several."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def with_one_system(messages: list[Json]) -> list[Json]:
    """Join the system's first messages, since many templates take no second one."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    texts = [each["content"] for each in messages[:count]]
    joined = "\n\n".join(
        text if isinstance(text, str) else "\n".join(str(part["text"]) for part in text)  # type: ignore[attr-defined]
        for text in texts
    )
    return [{"role": "system", "content": joined}, *messages[count:]]


def required_text(item: Mapping[str, object], name: str, place: str) -> str:
    """Read a field that must be a text."""
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{name}={value!r:.200}: give text")
    return value
