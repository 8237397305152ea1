"""A process that renders chat templates with jinja2 alone, and can be killed at any point.

chat_template.py runs this file as a script. A template is a program from a checkpoint: the kernel
ends this process if rendering takes too long, and gives it no more memory than MEMORY_BYTES.

A request is 8 bytes of length and JSON, {"template": text, "variables": {...}, "content_format":
...}; an answer is 8 bytes of length, then WRITTEN or REFUSED, then text. Where the variables are
null, the template is compiled only. The end of standard input ends the process.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache

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
    """The text, or why the template did not write it."""
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
    """The text that a template writes; ValueError for more than TEXT_BYTES of it."""
    text = bytearray()
    compiled = _compiled(template)
    if variables is None:
        return b""
    messages = variables.get("messages")
    if isinstance(messages, list):
        if content_format == "auto":
            content_format = "openai" if _reads_parts(template) else "string"
        as_read = _as_parts if content_format == "openai" else _as_text
        variables["messages"] = [each | {"content": as_read(each["content"])} for each in messages]
    for piece in compiled.generate(variables):
        text += piece.encode("utf-8", "surrogatepass")
        if len(text) > TEXT_BYTES:
            raise ValueError(f"it writes more than {TEXT_BYTES >> 20} MiB of text")
    return bytes(text)


def _as_text(content: str | list[object]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text_of, content))


def _as_parts(content: str | list[object]) -> list[dict[str, str]]:
    parts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": _text_of(part)} for part in parts]


def _text_of(part: object) -> str:
    return str(part["text"]) if isinstance(part, dict) else str(part)


@lru_cache(maxsize=4)
def _reads_parts(template: str) -> bool:
    """Whether it loops over the content of a message, or over a variable set to it (as vLLM)."""
    tree = _environment().parse(template)
    names = {
        each.target.name
        for each in tree.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name) and _is_content(each.node)
    }
    loops = (each.iter for each in tree.find_all(nodes.For))
    return any(
        _is_content(each) or (isinstance(each, nodes.Name) and each.name in names) for each in loops
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and node.arg == nodes.Const("content")


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect in which chat templates are written, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
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


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
