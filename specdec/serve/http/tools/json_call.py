"""A call written as a JSON object: {"name": ..., "arguments": ...}, or "parameters".

Arguments are passed on as they are written, before the object is complete. Text that is no such
object is found out before anything has been passed on, or ends the call.
"""

import json
import re
from collections.abc import Generator

from specdec.serve.http.tools.events import Arguments, Call
from specdec.serve.http.tools.source import Reading, Source, Waiting, joined

ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
SIGNS = re.compile(r'["{}\[\]]')
SIGNS_IN_STRING = re.compile(r'["\\]')
END_OF_WORD = re.compile(r"[\s,\]}]")

Pieces = Generator[str | None, None, None]


def read_call(source: Source, index: int, needs_arguments: bool) -> Reading[bool | None]:
    """The object that begins here; whether it is a call. Releases what is held, if it is one.

    None if max_tokens has cut it before that could be told. needs_arguments: an object with a name
    alone is no call.
    """
    name: str | None = None
    arguments: str | None = None  # those that came before the name
    source.at += 1
    while key := (yield from _next_key(source)):
        if key == "name" and name is None:
            name = yield from read_string(source)
            if name is None:
                return None if source.is_cut_here else False
        elif key in ARGUMENTS and arguments is None:
            if name is None:
                arguments = yield from joined(_arguments(source))
            elif (yield from _pass_on(source, index, name)):
                yield from _rest(source)
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
    """A call whose arguments come now, as they come; False if there are none."""
    is_begun = False
    for piece in _arguments(source):
        if piece is None:
            yield None
            continue
        if not is_begun:
            source.release()
            yield Call(index, name)
            is_begun = True
        yield Arguments(index, piece)
    return is_begun


def _rest(source: Source) -> Waiting[None]:
    """The members after the arguments, which mean nothing."""
    while (yield from _next_key(source)):
        yield from joined(_value(source))


def _next_key(source: Source) -> Waiting[str | None]:
    """The key of the next member, up to its value; "" at the end of the object, None for no JSON.

    A key that is empty is none either.
    """
    yield from source.skip(",")
    if (yield from source.accept("}")):
        return ""
    key = yield from read_string(source)
    yield from source.skip()
    is_key = bool(key) and (yield from source.accept(":"))
    yield from source.skip()
    return key if is_key else None


def read_string(source: Source) -> Waiting[str | None]:
    """A string; None if there is none, or it is no JSON. It may hold line breaks."""
    if (yield from source.peek()) != '"':
        return None
    raw = yield from joined(_value(source))
    try:
        return str(json.loads(raw, strict=False))
    except ValueError:
        return None


def _arguments(source: Source) -> Pieces:
    """As JSON text. Some models write it as a string, or null."""
    first = yield from source.peek()
    if first == "{":
        yield from _value(source)
    elif first == '"':
        text = yield from read_string(source)
        if text is not None:
            yield text.strip() or NO_ARGUMENTS
    else:
        word = yield from joined(_value(source))
        if word:
            yield NO_ARGUMENTS if word == "null" else word


def _value(source: Source) -> Pieces:
    """A value as it is written, in pieces. Its brackets are counted and nothing else is checked."""
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
    """A string, an object or a list."""
    depth = 0
    is_string = is_escaped = False
    while True:
        end = source.at
        is_complete = False
        while not is_complete and end < len(source.text):
            if is_escaped:
                is_escaped = False
                end += 1
                continue
            found = (SIGNS_IN_STRING if is_string else SIGNS).search(source.text, end)
            if found is None:
                end = len(source.text)
                break
            end = found.end()
            if found[0] == "\\":
                is_escaped = True
            elif found[0] == '"':
                is_string = not is_string
                is_complete = not is_string and depth == 0
            else:
                depth += 1 if found[0] in "{[" else -1
                is_complete = depth == 0
        if end > source.at:
            yield source.text[source.at : end]
            source.at = end
        if is_complete or source.is_over:
            return
        yield None
