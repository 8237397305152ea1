"""Calls in tags all through, as Qwen3-Coder writes them:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A text is written as it is, any other value as JSON: the schema of the parameter says which.
"""

import json
import re
from collections.abc import Generator, Mapping

from specdec.serve.http.tools.definitions import Schema, Tool
from specdec.serve.http.tools.events import Arguments, Call, Content
from specdec.serve.http.tools.hermes import CLOSE, OPEN, skip_tag
from specdec.serve.http.tools.source import (
    Reader,
    Reading,
    Source,
    Waiting,
    joined,
    read_content,
    read_until,
)

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]{1,256}")
WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, which some models write


class Qwen3XmlReader(Reader):
    """tools: those whose schemas say how values are read."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__()

    def _read(self, source: Source) -> Reading[None]:
        count = 0
        while (tag := (yield from read_content(source, (OPEN, FUNCTION), count > 0))) is not None:
            is_function = tag == FUNCTION
            if not is_function:
                yield from source.skip()
                is_function = yield from source.accept(FUNCTION)
            name = (yield from _name(source)) if is_function else None
            if name is None and (source.is_cut_here or source.accept_cut(FUNCTION)):
                source.release()
                return
            if name is None:
                yield Content(source.release())
                continue
            source.release()
            yield from self._call(source, count, name)
            count += 1
            yield from skip_tag(source, CLOSE)

    def _call(self, source: Source, index: int, name: str) -> Reading[None]:
        tool = self._tools.get(name)
        yield Call(index, name)
        yield Arguments(index, "{")
        separator = ""
        while True:
            source.hold()
            yield from source.skip()
            if not (yield from source.accept(PARAMETER)):
                break
            key = yield from _name(source)
            if key is None:
                break
            source.release()
            yield Arguments(index, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            write = _text if tool is None or is_text(tool.parameters, key) else _json
            for piece in write(source):
                yield None if piece is None else Arguments(index, piece)
        if source.accept_cut(PARAMETER) or source.is_cut_here:
            source.release()
            return
        is_cut = source.is_over and source.at == len(source.text)
        source.go_back()
        yield from skip_tag(source, END_FUNCTION)
        if not is_cut:
            yield Arguments(index, "}")


def _name(source: Source) -> Waiting[str | None]:
    """Up to a closing bracket; None if no name is there."""
    while True:
        found = NAME.match(source.text, source.at)
        end = source.at if found is None else found.end()
        if end < len(source.text) or source.is_over:
            break
        yield None
    if found is None or not source.text.startswith(">", end):
        source.at = end if source.is_cut and end == len(source.text) else source.at
        return None
    source.at = end + 1
    return found[0].strip()


def _text(source: Source) -> Generator[str | None, None, None]:
    """A text as JSON in pieces. One line break at each end belongs to the tags."""
    yield from source.accept("\n")
    yield '"'
    last = ""  # a line break that may be the last
    is_closed = False
    pieces = read_until(source, END_PARAMETER)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            is_closed = end.value
            break
        if piece is None:
            yield None
            continue
        piece = last + piece
        last = "\n" if piece.endswith("\n") else ""
        yield json.dumps(piece.removesuffix("\n"), ensure_ascii=False)[1:-1]
    if is_closed:
        yield '"'
    elif not source.is_cut:
        yield json.dumps(last)[1:-1]


def _json(source: Source) -> Generator[str | None, None, None]:
    """A value as JSON: as it is, if it is some or cut off, else as a text."""
    text = yield from joined(read_until(source, END_PARAMETER))
    is_open = source.is_cut_here and not source.text.endswith(END_PARAMETER)
    yield text.strip() if is_open else _as_json(text)


def _as_json(text: str) -> str:
    word = text.strip()
    try:
        json.loads(WORDS.get(word, word), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)
    return WORDS.get(word, word)


def _refuse(name: str) -> object:
    raise ValueError(name)


def is_text(parameters: Schema, key: str) -> bool:
    """Whether values of this parameter are texts and nothing else, or unknown."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if schema is None:
        return True
    resolved = resolve(schema, parameters)
    kind = resolved.get("type")
    if kind is None:
        values = resolved.get("enum", [resolved["const"]] if "const" in resolved else None)
        return isinstance(values, list) and all(isinstance(each, str) for each in values)
    return kind in ("string", ["string"])


def resolve(schema: object, root: Schema) -> Schema:
    """A schema, or the one in this document that it refers to; an empty one if there is none."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference.split("/")[1:]:
            schema = schema.get(part) if isinstance(schema, dict) else None
    return {}
