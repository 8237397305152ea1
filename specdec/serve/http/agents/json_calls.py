"""Calls written as JSON objects: {"name": ..., "arguments": ...}, or "parameters".

Hermes and Qwen write each in <tool_call> and </tool_call>, among content. Llama 3.1 to 3.3 write
nothing else, with ; between calls and maybe <|python_tag|> before them. Text that begins like a
call and is none is content.

Arguments are passed on as they are written, before the object is complete. Text that is no such
object is found out before anything has been passed on, or ends the call.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from specdec.serve.http.agents.events import (
    Arguments,
    Call,
    Content,
    Pieces,
    Reading,
    Source,
    Waiting,
    is_markup,
    joined,
    read_content,
)
from specdec.serve.http.agents.grammar import Lark
from specdec.serve.http.agents.tool_use import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
END_OF_WORD = re.compile(r"[\s,\]}]")

# reads what follows a tag as a call of this index; None if max_tokens has cut it before it is one
ReadCall = Callable[[Source, int, str], Reading[bool | None]]


def hermes_call(lark: Lark, tool: Tool) -> str:
    """Write the grammar of a call in tags."""
    head = lark.text(f'\n{{"name": "{tool.name}", "arguments": ')
    return in_tags(lark, f"{head} {lark.json(tool.parameters)}", "}\n")


def llama3_json_call(lark: Lark, tool: Tool) -> str:
    """Write the grammar of a call without tags."""
    head = lark.text(f'{{"name": "{tool.name}", "parameters": ')
    return f"{head} {lark.json(tool.parameters)} {lark.text('}')}"


def in_tags(lark: Lark, call: str, end: str) -> str:
    """Write the grammar of a call, and a text after it, between the tags."""
    return f"{lark.tag(OPEN)} {call} {lark.text(end)} {lark.tag(CLOSE)}"


def read_hermes(tools: Mapping[str, Tool], source: Source) -> Reading[None]:
    """Read content, and calls in tags. A call without a closing tag is one too."""
    return read_tagged(source, (OPEN,), _hermes_call)


def read_tagged(source: Source, tags: Sequence[str], read: ReadCall) -> Reading[None]:
    """Read content, and calls that begin with one of these tags."""
    count = 0
    while (tag := (yield from read_content(source, tags, count > 0))) is not None:
        is_call = yield from read(source, count, tag)
        if is_call is None:
            return
        if is_call:
            count += 1
            yield from skip_tag(source, CLOSE)
        else:
            yield Content(source.release())


def skip_tag(source: Source, tag: str) -> Waiting[None]:
    """Read a tag that may be next, and white space before it."""
    source.hold()
    yield from source.skip()
    if (yield from source.accept(tag)) or source.accept_cut(tag):
        source.release()
    else:
        source.go_back()


def read_llama3_json(tools: Mapping[str, Tool], source: Source) -> Reading[None]:
    """Read calls from the beginning of an answer on, and content from what is none."""
    count = 0
    while True:
        source.hold()
        yield from source.skip(";" if count else "")
        yield from source.accept(PYTHON_TAG)
        yield from source.skip()
        first = yield from source.peek()
        if first != "{" or not (yield from read_call(source, count, needs_arguments=True)):
            break
        count += 1
    source.go_back()
    is_blank = count > 0 and first == ""  # white space after the last call
    if is_blank or (source.is_cut and _begins_call(source.text[source.at :], count, tools)):
        return
    yield from read_content(source, ())


def _begins_call(text: str, count: int, tools: Mapping[str, Tool]) -> bool:
    """Tell whether a call of one of the tools may begin so, or the tag before it.

    After calls whatever has a name is one more: it is no answer in JSON.
    """
    text = "".join(text.split()).lstrip(";")
    if is_markup(text, (PYTHON_TAG,), count > 0):
        return True
    text = text.removeprefix(PYTHON_TAG)
    heads = ['{"name":"'] if count else [f'{{"name":"{name}"' for name in tools]
    return text != "" and any(text.startswith(head) or head.startswith(text) for head in heads)


def _hermes_call(source: Source, index: int, tag: str) -> Reading[bool | None]:
    yield from source.skip()
    if (yield from source.peek()) == "{":
        return (yield from read_call(source, index, needs_arguments=False))
    return None if source.is_cut_here else False


def read_call(source: Source, index: int, needs_arguments: bool) -> Reading[bool | None]:
    """Read the object that begins here; tell whether it is a call, and release it if so.

    None if max_tokens has cut it before that could be told. needs_arguments: an object with a name
    alone is no call.
    """
    name: str | None = None
    arguments: str | None = None  # those that came before the name
    source.at += 1
    while key := (yield from _next_key(source)):
        if key == "name" and name is None:
            name = yield from _read_string(source)
            if name is None:
                return None if source.is_cut_here else False
        elif key in ARGUMENTS and arguments is None:
            if name is None:
                arguments = yield from joined(_arguments(source))
            elif (yield from _pass_on(source, index, name)):
                while (yield from _next_key(source)):  # what follows them means nothing
                    yield from joined(_value(source))
                return True
            else:
                arguments = ""
        else:
            yield from joined(_value(source))
    is_closed = key == ""
    if not is_closed and source.is_cut_here:
        return None
    if name is None or not is_closed or (needs_arguments and arguments is None):
        return False
    source.release()
    yield Call(index, name)
    yield Arguments(index, arguments or NO_ARGUMENTS)
    return True


def _pass_on(source: Source, index: int, name: str) -> Reading[bool]:
    """Pass on a call whose arguments come now, as they come; False if there are none."""
    is_begun = False
    for piece in _arguments(source):
        if piece is not None and not is_begun:
            is_begun = True
            source.release()
            yield Call(index, name)
        yield None if piece is None else Arguments(index, piece)
    return is_begun


def _next_key(source: Source) -> Waiting[str | None]:
    """Read the key of the next member, up to its value; "" at the object's end, None for no JSON.

    A key that is empty is none either.
    """
    yield from source.skip(",")
    if (yield from source.accept("}")):
        return ""
    key = yield from _read_string(source)
    yield from source.skip()
    is_key = bool(key) and (yield from source.accept(":"))
    yield from source.skip()
    return key if is_key else None


def _read_string(source: Source) -> Waiting[str | None]:
    """Read a string, which may hold line breaks; None if there is none, or it is no JSON."""
    if (yield from source.peek()) != '"':
        return None
    raw = yield from joined(_value(source))
    try:
        return str(json.loads(raw, strict=False))
    except ValueError:
        return None


def _arguments(source: Source) -> Pieces:
    """Yield arguments as JSON text. Some models write it as a string, or null."""
    first = yield from source.peek()
    if first == "{":
        yield from _value(source)
    elif first == '"':
        text = yield from _read_string(source)
        if text is not None:
            yield text.strip() or NO_ARGUMENTS
    else:
        word = yield from joined(_value(source))
        if word:
            yield NO_ARGUMENTS if word == "null" else word


def _value(source: Source) -> Pieces:
    """Yield a value as it is written. Its brackets are counted and nothing else is checked."""
    first = yield from source.peek()
    if first and first in '"{[':
        yield from _bracketed(source)
        return
    while True:
        found = END_OF_WORD.search(source.text, source.at)
        end = len(source.text) if found is None else found.start()
        if end > source.at:
            yield source.text[source.at : end]
            source.at = end
        if found is not None or source.is_over:
            return
        yield None


def _bracketed(source: Source) -> Pieces:
    """Yield a string, an object or a list."""
    depth, is_string, is_escaped = 0, False, False
    while True:
        start, is_complete = source.at, False
        while source.at < len(source.text) and not is_complete:
            char = source.text[source.at]
            source.at += 1
            if is_escaped:
                is_escaped = False
            elif char == '"':
                is_string = not is_string
            elif is_string:
                is_escaped = char == "\\"
            else:
                depth += (char in "{[") - (char in "}]")
            is_complete = depth == 0 and not is_string
        if source.at > start:
            yield source.text[start : source.at]
        if is_complete or source.is_over:
            return
        yield None
