"""A process that renders chat templates with jinja2 alone, and can be killed at any point.

chat_template.py runs this file as a script. A template is a program from a checkpoint: the kernel
ends this process if rendering takes too long, and gives it no more memory than MEMORY_BYTES.

A request is 8 bytes of length and JSON, {"template": text, "variables": {...}, "content_format":
...}; an answer is 8 bytes of length, then WRITTEN or REFUSED, then text. Where the variables are
null, the template is compiled only. The end of standard input ends the process.

Arguments of calls come as {"object": ..., "text": its JSON, or null}. A template is given these,
and each content, in a form that it can read. Only rendering tells which one that is, so objects
note how they are read, and those that were misread are given in their next form.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 2.0  # for one conversation; real templates take milliseconds
TEXT_BYTES = 16 * 2**20
MEMORY_BYTES = 256 * 2**20  # of addresses, Python included: room for copies of the longest text
ERROR_CHARACTERS = 2000
WRITTEN, REFUSED = b"w", b"r"
OUT_OF_MEMORY = 3  # exit status
LENGTH_BYTES = 8


def main() -> None:
    """Answer requests until there are no more."""
    _limit()
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    while len(header := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        request = requests.read(int.from_bytes(header))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(len(reply).to_bytes(LENGTH_BYTES) + reply)
        answers.flush()


def _limit() -> None:
    """Unblock the signal that the parent may have blocked or ignored, and bound the memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answer(request: bytes) -> bytes:
    """Answer with the text, or why the template did not write it."""
    try:
        return WRITTEN + render(**json.loads(request))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: the interpreter's own end needs memory too
    except Exception as error:  # whatever a template raises is its answer
        words = str(error)[:ERROR_CHARACTERS] or type(error).__name__
        return REFUSED + words.encode("utf-8", "backslashreplace")


def render(
    template: str, variables: dict[str, object] | None, content_format: str = "auto"
) -> bytes:
    """Render the text of a template; ValueError for more than TEXT_BYTES of it."""
    compiled = _compiled(template)
    if variables is None:
        return b""
    messages = variables.get("messages")
    if not isinstance(messages, list):
        return _written(compiled, variables)
    if content_format == "auto" and "text" not in template:  # the key of a part's text
        content_format = "string"
    try:
        return _with_contents(compiled, variables, _with_calls(messages, False), content_format)
    except MemoryError:
        raise
    except Exception as error:  # some templates join arguments as text, which an object is not
        if not any(each.get("tool_calls") for each in messages):
            raise
        try:
            return _with_contents(compiled, variables, _with_calls(messages, True), content_format)
        except Exception as other:
            raise (other if isinstance(other, MemoryError) else error) from other


def _written(compiled: Template, variables: dict[str, object]) -> bytes:
    text = bytearray()
    for piece in compiled.generate(variables):
        text += piece.encode("utf-8", "surrogatepass")
        if len(text) > TEXT_BYTES:
            raise ValueError(f"it writes more than {TEXT_BYTES >> 20} MiB of text")
    return bytes(text)


def _with_contents(
    compiled: Template,
    variables: dict[str, object],
    messages: list[dict[str, object]],
    content_format: str,
) -> bytes:
    """Render with each content in the first of its forms that the template can read."""
    forms = [_forms(each["content"], content_format) for each in messages]
    given = [each | {"content": next(form)} for each, form in zip(messages, forms, strict=True)]
    while True:
        error = None
        try:
            text = _written(compiled, variables | {"messages": list(given)})
        except MemoryError:
            raise
        except Exception as found:
            error = found
        wrong = [index for index, each in enumerate(given) if _is_misread(each["content"])]
        for index in wrong:
            given[index] = given[index] | {"content": next(forms[index])}
        if wrong:
            continue
        if error is not None:
            raise error
        return text


def _forms(content: Any, content_format: str) -> Iterator[object]:
    """List the forms of a content. A text stays one, unless its elements are taken for parts. Parts
    become a text, unless each is read. The last form is what was given.
    """
    if content is None:
        yield Null()
        return
    texts = [content] if isinstance(content, str) else list(map(_text_of, content))
    joined = content if isinstance(content, str) else "\n".join(texts)
    if content_format == "auto":
        if not isinstance(content, str):
            yield Parts(texts)
        yield Text(joined) if isinstance(content, str) else JoinedText(joined)
        yield Parts([joined])
        content_format = "string" if isinstance(content, str) else "openai"
    if content_format == "string":
        yield joined
    else:
        yield [{"type": "text", "text": text} for text in texts]


def _is_misread(content: object) -> bool:
    return isinstance(content, Text | Parts) and content._is_misread


def _text_of(part: object) -> str:
    return str(part["text"]) if isinstance(part, dict) else str(part)


class Text(str):
    """A content that notes whether a template takes its characters for parts."""

    _joins_parts = False  # if so, a template that goes through it at all takes them for parts
    _is_misread = False

    def __iter__(self) -> Iterator[str]:
        for each in str.__iter__(self):
            self._is_misread |= self._joins_parts
            yield Character(each, self)

    def __getitem__(self, place: Any) -> str:
        found = str.__getitem__(self, place)
        return found if isinstance(place, slice) else Character(found, self)


class JoinedText(Text):
    """The text of a list of parts."""

    _joins_parts = True


class Character(str):
    """A character of a text. It has neither keys nor names of its own: parts have."""

    _of: Text

    def __new__(cls, text: str, of: Text) -> "Character":
        self = str.__new__(cls, text)
        self._of = of
        return self

    def __getitem__(self, place: Any) -> str:
        self._of._is_misread |= isinstance(place, str)
        return str.__getitem__(self, place)

    def __getattr__(self, name: str) -> object:
        self._of._is_misread |= not name.startswith("_")
        raise AttributeError(name)


class Parts(list[dict[str, str]]):
    """A content that notes whether a template reads the text of each part, and nothing whole.

    In the meantime it passes for a text where it is taken for one, so that all is found out at
    once.
    """

    def __init__(self, texts: list[str]) -> None:
        super().__init__(map(Part, texts))
        self._text = "\n".join(texts)
        self._is_whole = False

    @property
    def _is_misread(self) -> bool:
        return self._is_whole or any(each._is_whole or not each._is_read for each in self)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        self._is_whole = True
        return self._text

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else NotImplemented

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(str(self), name)


class Part(dict[str, str]):
    """A part of a content that notes how it is read."""

    def __init__(self, text: str) -> None:
        super().__init__(type="text", text=text)
        self._is_read = self._is_whole = False

    def __getitem__(self, key: str) -> str:
        self._is_read |= key == "text"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._is_read |= key == "text"
        return super().get(key, default)

    def items(self) -> Any:  # JSON is written from these
        self._is_whole = True
        return super().items()

    def __repr__(self) -> str:
        self._is_whole = True
        return super().__repr__()


class Null:
    """The content of a message that has none: it is `none`, and an empty text where it is written.

    Some templates write calls only where the content is none; others join any content.
    """

    def __str__(self) -> str:
        return ""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __hash__(self) -> int:
        return hash(None)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __add__(self, other: Any) -> Any:
        return "" + other

    def __radd__(self, other: Any) -> Any:
        return other + ""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr("", name)


class Arguments(dict[str, object]):
    """Arguments of a call as an object, which is its JSON text where it is written as a text."""

    def __init__(self, found: dict[str, object], text: str) -> None:
        super().__init__(found)
        self._text = text

    def __str__(self) -> str:
        return self._text


def _with_calls(messages: list[dict[str, Any]], are_texts: bool) -> list[dict[str, Any]]:
    """Give messages' calls their arguments as objects, or as JSON texts."""
    return [
        each | {"tool_calls": [_with_arguments(call, are_texts) for call in calls]}
        if (calls := each.get("tool_calls"))
        else each
        for each in messages
    ]


def _with_arguments(call: dict[str, Any], are_texts: bool) -> dict[str, Any]:
    """Fill in the other form: OpenAI's clients send a text, Python callers may give an object."""
    forms = call["function"].get("arguments")
    if not isinstance(forms, dict):
        return call
    found = forms["object"]
    text = _to_json(found) if forms["text"] is None else forms["text"]
    arguments = text if are_texts else Arguments(found, text)
    return call | {"function": call["function"] | {"arguments": arguments}}


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """Build the dialect in which chat templates are written, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = _is_none
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": PublicNamespace,
        "dict": DictMaker(),
    }
    return environment


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks text to train on; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:  # self may be a template's own name
        self, *pairs = args
        names = dict(*pairs, **kwargs)
        for name in names:
            _check_public(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class DictMaker:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of dict."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, Null)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of jinja2's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_null,
    )


def _null(value: object) -> None:
    if not isinstance(value, Null):
        raise TypeError(f"{type(value).__name__} is no JSON")


if __name__ == "__main__":
    main()
