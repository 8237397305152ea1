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
from collections.abc import Mapping
from functools import partial

from specdec.serve.http.agents.events import (
    Arguments,
    Call,
    Pieces,
    Reading,
    Source,
    Waiting,
    joined,
    read_until,
)
from specdec.serve.http.agents.grammar import Lark
from specdec.serve.http.agents.json_calls import OPEN, in_tags, read_tagged, skip_tag
from specdec.serve.http.agents.tool_use import Schema, Tool

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]{1,256}")
WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, which some models write


def qwen3_xml_call(lark: Lark, tool: Tool) -> str:
    """Write the grammar of a call, with the parameters that its schema names, in their order.

    ValueError for a parameter whose name would not be read back.
    """
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    parts = []
    for key, schema in properties.items() if isinstance(properties, dict) else ():
        if not NAME.fullmatch(key) or key != key.strip():
            raise ValueError(f"tools: {tool.name!r} has a parameter {key!r:.100}: it needs a name")
        rule = lark.rule(_parameter_rule(lark, tool.parameters, key, schema))
        parts.append(rule if key in required else f"{rule}?")
    head = lark.text(f"\n{FUNCTION}{tool.name}>\n")
    return in_tags(lark, f"{head} {' '.join(parts)}", f"{END_FUNCTION}\n")


def _parameter_rule(lark: Lark, parameters: Schema, key: str, schema: object) -> str:
    """Keep a text to its possible values or its lengths only: its pattern is not kept."""
    head = lark.text(f"{PARAMETER}{key}>\n")
    end = f"\n{END_PARAMETER}\n"
    if not _is_text(parameters, key):
        definitions = {
            name: parameters[name] for name in ("$defs", "definitions") if name in parameters
        }
        value = schema if isinstance(schema, dict) else {}
        return f"{head} {lark.json({**definitions, **value})} {lark.text(end)}"
    found = _resolved(schema, parameters)
    values = _allowed(found)
    if isinstance(values, list):
        choices = " | ".join(lark.text(str(value)) for value in values)
        return f"{head} ({choices}) {lark.text(end)}"
    low, high = found.get("minLength"), found.get("maxLength")
    count = f"{low or 0},{'' if high is None else high}"
    return f"{head} {lark.rule(f'/(?s:.{{{count}}})/', suffix=end)}"


def read_qwen3_xml(tools: Mapping[str, Tool], source: Source) -> Reading[None]:
    """Read content and calls. tools: those whose schemas say how values are read."""
    return read_tagged(source, (OPEN, FUNCTION), partial(_read_call, tools))


def _read_call(
    tools: Mapping[str, Tool], source: Source, index: int, tag: str
) -> Reading[bool | None]:
    is_function = tag == FUNCTION
    if not is_function:
        yield from source.skip()
        is_function = yield from source.accept(FUNCTION)
    name = (yield from _name(source)) if is_function else None
    if name is None:
        return None if source.accept_cut(FUNCTION) else False
    source.release()
    yield Call(index, name)
    yield Arguments(index, "{")
    yield from _read_parameters(source, index, tools.get(name))
    if source.accept_cut(PARAMETER):
        return True
    is_cut = source.is_over and source.at == len(source.text)
    source.go_back()
    yield from skip_tag(source, END_FUNCTION)
    if not is_cut:
        yield Arguments(index, "}")
    return True


def _read_parameters(source: Source, index: int, tool: Tool | None) -> Reading[None]:
    """Read them up to something else, which is held."""
    separator = ""
    while True:
        source.hold()
        yield from source.skip()
        if not (yield from source.accept(PARAMETER)):
            return
        key = yield from _name(source)
        if key is None:
            return
        source.release()
        yield Arguments(index, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        read = _text if tool is None or _is_text(tool.parameters, key) else _json
        for piece in read(source):
            yield None if piece is None else Arguments(index, piece)


def _name(source: Source) -> Waiting[str | None]:
    """Read up to a closing bracket; None if no name is there."""
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


def _text(source: Source) -> Pieces:
    """Yield a text as JSON. One line break at each end belongs to the tags."""
    yield from source.accept("\n")
    yield '"'
    last = ""  # a line break that may be the last
    for piece in read_until(source, END_PARAMETER):
        if piece is None:
            yield None
            continue
        piece = last + piece
        last = "\n" if piece.endswith("\n") else ""
        yield json.dumps(piece.removesuffix("\n"), ensure_ascii=False)[1:-1]
    if _is_closed(source):
        yield '"'
    elif not source.is_cut:
        yield json.dumps(last)[1:-1]


def _json(source: Source) -> Pieces:
    """Yield a value as JSON: as it is, if it is some or cut off, else as a text."""
    text = yield from joined(read_until(source, END_PARAMETER))
    if source.is_cut_here and not _is_closed(source):
        yield text.strip()
        return
    word = text.strip()
    try:
        json.loads(WORDS.get(word, word), parse_constant=_refuse)
        yield WORDS.get(word, word)
    except (ValueError, RecursionError):
        yield json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


def _is_closed(source: Source) -> bool:
    """Tell whether the value that was read has ended with its tag."""
    return source.text.endswith(END_PARAMETER, 0, source.at)


def _refuse(name: str) -> object:
    raise ValueError(name)


def _is_text(parameters: Schema, key: str) -> bool:
    """Tell whether values of this parameter are texts and nothing else, or unknown."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if schema is None:
        return True
    resolved = _resolved(schema, parameters)
    if resolved.get("type") is None:
        values = _allowed(resolved)
        return isinstance(values, list) and all(isinstance(each, str) for each in values)
    return resolved["type"] in ("string", ["string"])


def _allowed(schema: Schema) -> object:
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _resolved(schema: object, root: Schema) -> Schema:
    """Return a schema, or the one in this document that it refers to; empty if there is none."""
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
