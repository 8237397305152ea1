"""The grammar of one call of a tool, in the syntax that its reader reads back.

In Lark's syntax, with the extensions of llguidance: %json for a schema, suffix for text up to a
tag. A tag that is a special token of the tokenizer is written as one.
"""

import json
from collections.abc import Callable, Collection

from specdec.requests.json_schemas import GUIDANCE, prepared
from specdec.requests.structured_outputs import JSON_SPACE
from specdec.serve.http.tools import hermes, qwen3_xml
from specdec.serve.http.tools.definitions import Schema, Tool


class Lark:
    """A grammar in the making. special: the tokenizer's special tokens."""

    def __init__(self, special: Collection[str]) -> None:
        self._special = special
        self._rules: list[str] = []

    def rule(self, body: str, suffix: str = "") -> str:
        """The name of a new rule. suffix: text that ends it."""
        name = f"r{len(self._rules)}"
        attribute = f"[suffix={json.dumps(suffix)}]" if suffix else ""
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def text(self, text: str) -> str:
        """As it is."""
        return json.dumps(text, ensure_ascii=False)

    def tag(self, tag: str) -> str:
        """A text, which may be a special token."""
        return tag if tag in self._special else self.text(tag)

    def json(self, schema: Schema) -> str:
        """A value of a schema; SchemaError if there is none."""
        found = prepared(schema)
        guidance = {"whitespace_pattern": JSON_SPACE, **(found.get(GUIDANCE) or {})}
        return self.rule(f"%json {json.dumps({**found, GUIDANCE: guidance})}")

    def until(self, tag: str) -> str:
        """Any text up to a tag, and the tag."""
        if tag in self._special:
            return f"{self.rule('/(?s:.*)/')} {tag}"
        return self.rule("/(?s:.*)/", suffix=tag)

    def grammar(self, start: str) -> str:
        """All rules."""
        return "\n".join([f"start: {start}", *self._rules])


CallRule = Callable[[Lark, Tool], str]


def hermes_call(lark: Lark, tool: Tool) -> str:
    """A tool's call."""
    head = lark.text(f'\n{{"name": "{tool.name}", "arguments": ')
    tags = lark.tag(hermes.OPEN), lark.tag(hermes.CLOSE)
    return f"{tags[0]} {head} {lark.json(tool.parameters)} {lark.text('}' + chr(10))} {tags[1]}"


def llama3_json_call(lark: Lark, tool: Tool) -> str:
    """A tool's call."""
    head = lark.text(f'{{"name": "{tool.name}", "parameters": ')
    return f"{head} {lark.json(tool.parameters)} {lark.text('}')}"


def qwen3_xml_call(lark: Lark, tool: Tool) -> str:
    """A tool's call, with the parameters that its schema names, in their order.

    ValueError for a parameter whose name would not be read back.
    """
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    parts = []
    for key, schema in properties.items() if isinstance(properties, dict) else ():
        if not qwen3_xml.NAME.fullmatch(key) or key != key.strip():
            raise ValueError(f"tools: {tool.name!r} has a parameter {key!r:.100}: it needs a name")
        rule = lark.rule(_xml_parameter(lark, tool.parameters, key, schema))
        parts.append(rule if key in required else f"{rule}?")
    head = lark.text(f"\n{qwen3_xml.FUNCTION}{tool.name}>\n")
    end = lark.text(f"{qwen3_xml.END_FUNCTION}\n")
    tags = lark.tag(hermes.OPEN), lark.tag(hermes.CLOSE)
    return f"{tags[0]} {head} {' '.join(parts)} {end} {tags[1]}"


def _xml_parameter(lark: Lark, parameters: Schema, key: str, schema: object) -> str:
    """Of a text only its possible values or its lengths are kept to: a pattern is not."""
    head = lark.text(f"{qwen3_xml.PARAMETER}{key}>\n")
    end = f"\n{qwen3_xml.END_PARAMETER}\n"
    if not qwen3_xml.is_text(parameters, key):
        definitions = {
            name: parameters[name] for name in ("$defs", "definitions") if name in parameters
        }
        value = schema if isinstance(schema, dict) else {}
        return f"{head} {lark.json({**definitions, **value})} {lark.text(end)}"
    found = qwen3_xml.resolve(schema, parameters)
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(values, list):
        choices = " | ".join(lark.text(str(value)) for value in values)
        return f"{head} ({choices}) {lark.text(end)}"
    low, high = (found.get(name) for name in ("minLength", "maxLength"))
    count = (
        "*" if low is None and high is None else f"{{{low or 0},{'' if high is None else high}}}"
    )
    return f"{head} {lark.rule(f'/(?s:.{count})/', suffix=end)}"


def special_tokens(tokens: Collection[str]) -> frozenset[str]:
    """Those that Lark can name: in angle brackets."""
    return frozenset(each for each in tokens if each.startswith("<") and each.endswith(">"))
