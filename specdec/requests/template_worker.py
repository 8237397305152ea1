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
from collections.abc import Iterator
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
    _limit()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
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


def render(template: str, variables: dict[str, Any] | None, content_format: str = "auto") -> bytes:
    """Render the text of a template; ValueError for more than TEXT_BYTES of it."""
    compiled = _compiled(template)
    if variables is None:
        return b""
    if content_format == "auto" and "text" not in template:  # the key of a part's text
        content_format = "string"
    try:
        return _with_contents(compiled, variables, content_format, False)
    except Exception as error:  # some templates join arguments as text, which an object is not
        try:
            return _with_contents(compiled, variables, content_format, True)
        except Exception:
            raise error from None


def _written(compiled: Template, variables: dict[str, object]) -> bytes:
    text = bytearray()
    for piece in compiled.generate(variables):
        text += piece.encode("utf-8", "surrogatepass")
        if len(text) > TEXT_BYTES:
            raise ValueError(f"it writes more than {TEXT_BYTES >> 20} MiB of text")
    return bytes(text)


def _with_contents(
    compiled: Template, variables: dict[str, Any], content_format: str, calls_are_texts: bool
) -> bytes:
    """Render with each content in the first of its forms that the template can read."""
    messages = variables.get("messages", [])
    forms = [_forms(each["content"], content_format) for each in messages]
    given = [
        _with_calls(each, calls_are_texts) | {"content": next(form)}
        for each, form in zip(messages, forms, strict=True)
    ]
    while True:
        try:
            text = _written(compiled, variables | {"messages": list(given)})
        except Exception:
            if not _change_misread(given, forms):
                raise
        else:
            if not _change_misread(given, forms):
                return text


def _change_misread(given: list[dict[str, object]], forms: list[Iterator[object]]) -> bool:
    """Give each content that was misread its next form; return whether any was."""
    wrong = [i for i, each in enumerate(given) if getattr(each["content"], "_is_misread", False)]
    for i in wrong:
        given[i] = given[i] | {"content": next(forms[i])}
    return bool(wrong)


def _forms(content: Any, content_format: str) -> Iterator[object]:
    """List the forms of a content. A text stays one, unless its elements are taken for parts. Parts
    become a text, unless each is read. The last form is what was given.
    """
    if content is None:
        yield Null()
        return
    is_text = isinstance(content, str)
    parts = [content] if is_text else content
    texts = [part["text"] if isinstance(part, dict) else part for part in parts]
    joined = "\n".join(texts)
    if content_format == "auto":
        if not is_text:
            yield Parts(texts)
        yield Text(joined)
        yield Parts([joined])
        content_format = "string" if is_text else "openai"
    if content_format == "string":
        yield joined
    else:
        yield [{"type": "text", "text": text} for text in texts]


class Text(str):
    """A content that notes whether a template takes its characters for parts.

    One that takes them for characters does not read parts, and gets a plain text in the end.
    """

    _is_misread = False

    def __iter__(self) -> Iterator[str]:
        self._is_misread = True  # by the first step: `is iterable` takes none
        yield from str.__iter__(self)

    def __getitem__(self, place: Any) -> str:
        self._is_misread |= not isinstance(place, slice)
        return str.__getitem__(self, place)


class Parts(list[dict[str, str]]):
    """A content that notes whether a template reads the text of each part, and nothing whole.

    In the meantime it passes for a text where it is taken for one, so that all is found out at
    once.
    """

    def __init__(self, texts: list[str]) -> None:
        super().__init__(map(Part, texts))
        self._text = "\n".join(texts)

    @property
    def _is_misread(self) -> bool:
        return any(each._uses != {"text"} for each in self)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        list(map(repr, self))  # which notes it
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
    """A part of a content that notes whether its text is read, or all of it."""

    def __init__(self, text: str) -> None:
        super().__init__(type="text", text=text)
        self._uses: set[str] = set()

    def __getitem__(self, key: str) -> str:
        self._uses |= {key} & {"text"}
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  it notes the key

    def items(self) -> Any:  # JSON is written from these
        self._uses.add("all")
        return super().items()

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class Null(str):
    """The content of a message that has none: it is `none`, and an empty text where it is written.

    Some templates write calls only where the content is none; others join any content.
    """

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Arguments(dict[str, object]):
    """Arguments of a call as an object, which is its JSON text where it is written as a text."""

    def __init__(self, found: dict[str, object], text: str) -> None:
        super().__init__(found)
        self._text = text

    def __str__(self) -> str:
        return self._text


def _with_calls(message: dict[str, Any], are_texts: bool) -> dict[str, Any]:
    """Give a message's calls their arguments as objects, or as JSON texts.

    OpenAI's clients send a text, Python callers may give an object: the other form is made here.
    """
    calls = list(message.get("tool_calls") or ())
    for i, call in enumerate(calls):
        if isinstance(forms := call["function"].get("arguments"), dict):
            text = _to_json(forms["object"]) if forms["text"] is None else forms["text"]
            arguments = text if are_texts else Arguments(forms["object"], text)
            calls[i] = call | {"function": call["function"] | {"arguments": arguments}}
    return message | {"tool_calls": calls} if calls else message


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compile the dialect in which chat templates are written, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = lambda value: value is None or isinstance(value, Null)
    environment.tests["string"] = lambda value: type(value) is not Null and isinstance(value, str)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": PublicNamespace,
        "dict": DictMaker(),
    }
    return environment.from_string(template)


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks text to train on; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: object) -> None:  # self may be a template's own name
        self, *pairs = args
        Namespace.__init__(self)
        for name, value in dict(*pairs, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"no name in a namespace begins with an underscore: {name!r}")
        super().__setitem__(name, value)


class DictMaker:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of dict."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: object) -> object:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of jinja2's own."""
    return json.dumps(
        _with_null(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_null(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(each) for each in value]
    return None if isinstance(value, Null) else value


if __name__ == "__main__":
    main()
