"""A grammar in Lark's syntax, with the extensions of llguidance.

They are %json for a schema, and suffix for text up to a tag. A tag that is a special token of the
tokenizer is written as one.
"""

import json
from collections.abc import Collection

from specdec.requests.json_schemas import GUIDANCE, prepared
from specdec.requests.structured_outputs import JSON_SPACE
from specdec.serve.http.agents.tool_use import Schema


class Lark:
    """Collects rules. special: the tokenizer's special tokens."""

    def __init__(self, special: Collection[str]) -> None:
        self._special = special
        self._rules: list[str] = []

    def rule(self, body: str, suffix: str = "") -> str:
        """Add a rule and return its name. suffix: text that ends it."""
        name = f"r{len(self._rules)}"
        attribute = f"[suffix={json.dumps(suffix)}]" if suffix else ""
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def tag(self, tag: str) -> str:
        """Write a text which may be a special token."""
        return tag if tag in self._special else self.text(tag)

    def json(self, schema: Schema) -> str:
        """Allow a value of a schema; SchemaError if there is none."""
        found = prepared(schema)
        guidance = {"whitespace_pattern": JSON_SPACE, **(found.get(GUIDANCE) or {})}
        return self.rule(f"%json {json.dumps({**found, GUIDANCE: guidance})}")

    def until(self, tag: str) -> str:
        """Allow any text up to a tag, and the tag."""
        if tag in self._special:
            return f"{self.rule('/(?s:.*)/')} {tag}"
        return self.rule("/(?s:.*)/", suffix=tag)

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])
