"""JSON schemas as the compiler of grammars has to get them, checked for what it does not see.

If a schema refers to itself and never ends in a value, its texts would end with max_tokens only. An
unknown `format` is an annotation, as the standard says. `x-guidance`, the compiler's own keyword,
may choose blanks and escapes, and nothing that makes a text invalid JSON or ignores a part of the
schema.
"""

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

logger = logging.getLogger("specdec")

FORMATS = frozenset(  # that the compiler holds a text to
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
MOST_NOTED = 100  # formats, in the log of a process
_noted: set[str] = set()
MOST_PASSES = 50  # over the subschemas of a schema

ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

GUIDANCE = "x-guidance"
BLANKS = r"(?:[ \n\r\t]|\\[nrt]|\\x(?:20|0[AaDd9])|[][()|*+?]|\{\d+(?:,\d*)?\}){0,100}"
PATTERNS = {
    "whitespace_pattern": BLANKS,
    "item_separator": f"{BLANKS},{BLANKS}",
    "key_separator": f"{BLANKS}:{BLANKS}",
    "json_allowed_escapes": '[bfnrtu"\\\\/]{0,9}',
}
FLAGS = ("whitespace_flexible", "coerce_one_of", "json_allow_general_unicode_escapes")
ALLOWED = ", ".join((*FLAGS, *PATTERNS))

Schema = dict[str, Any]


class SchemaError(ValueError):
    """Names what is wrong with a schema, not where the schema was given."""


def prepared_text(text: str) -> str:
    """Prepare a schema given as text; the compiler refuses what is no JSON object."""
    try:
        schema = json.loads(text)
        found = prepared(schema) if isinstance(schema, dict) else schema
        return text if found == schema else json.dumps(found)
    except SchemaError:
        raise
    except (ValueError, RecursionError):
        return text


def prepared(schema: Mapping[str, Any]) -> Schema:
    """Drop unknown formats. SchemaError if the schema never ends or its x-guidance is wide."""
    root: Schema = dict(schema)
    _check_guidance(root.get(GUIDANCE))
    found = Subschemas(root)
    if not found.have_an_end:
        raise SchemaError(
            "the schema refers to itself and never ends in a value: make what repeats optional, or "
            'one of several in "anyOf"'
        )
    given = {id(each): each.get("format") for each in found}
    unknown = {
        number: name
        for number, name in given.items()
        if isinstance(name, str) and name not in FORMATS
    }
    for name in sorted({*unknown.values()} - _noted)[: MOST_NOTED - len(_noted)]:
        _noted.add(name)
        logger.info("a JSON schema has the format %.100r, which no text is held to", name)
    return _without_formats(root, unknown) if unknown else root


def _without_formats(value: Any, unknown: Mapping[int, str]) -> Any:
    """Copy a value without unknown formats, and with the other values of the same objects."""
    if isinstance(value, dict):
        return {
            key: _without_formats(each, unknown)
            for key, each in value.items()
            if key != "format" or id(value) not in unknown
        }
    return [_without_formats(each, unknown) for each in value] if isinstance(value, list) else value


def _check_guidance(given: object) -> None:
    if not isinstance(given, dict):
        return  # the compiler says what is wrong with anything but None
    for name, value in given.items():
        if name in FLAGS:
            fits, wanted = isinstance(value, bool), "give true or false"
        elif name in PATTERNS:
            fits = isinstance(value, str) and re.fullmatch(PATTERNS[name], value) is not None
            wanted = "give a regex of JSON's own blanks and signs, of at most 100 parts"
        else:
            raise SchemaError(f"{GUIDANCE}: {name!r:.100}={value!r:.100}: allowed are {ALLOWED}")
        if value is not None and not fits:
            raise SchemaError(f"{GUIDANCE}: {name!r:.100}={value!r:.100}: {wanted}")


class Subschemas:
    """All subschemas of a schema: itself, and those that only a $ref names, too."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[int, tuple[Schema, str]] = {}  # with the URI that its references are of
        self._named: dict[str, Any] = {"": root}  # by URI
        self._targets: dict[int, Any] = {}  # of each schema's $ref
        self._unresolved: list[tuple[Schema, str]] = []
        self._collect(root, "")
        while self._unresolved:
            schema, base = self._unresolved.pop()
            document, fragment = urldefrag(urljoin(base, schema["$ref"]))
            self._targets[id(schema)] = target = self._target(document, fragment)
            self._collect(target, document)

    def __iter__(self) -> Iterator[Schema]:
        return (schema for schema, _ in self._known.values())

    @property
    def have_an_end(self) -> bool:
        """Whether a value of finite size exists, as far as references decide it.

        What is found last is looked at first, since others need it: one pass or two are enough. A
        schema that needs MOST_PASSES counts as one that ends.
        """
        if not self._targets:
            return True
        waiting = {number: list(self._needs(each)) for number, (each, _) in self._known.items()}
        for _ in range(MOST_PASSES):
            count = len(waiting)
            for number in reversed(list(waiting)):
                if all(_has_end(need, waiting) for need in waiting[number]):
                    del waiting[number]
            if id(self._root) not in waiting or len(waiting) == count:
                return id(self._root) not in waiting
        return True

    def _collect(self, schema: Any, base: str) -> None:
        waiting = [(schema, base)]
        while waiting:
            schema, base = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._known:
                continue
            if isinstance(schema.get("$id"), str):
                base = urldefrag(urljoin(base, schema["$id"])).url
                self._named[base] = schema
            if isinstance(schema.get("$anchor"), str):
                self._named[f"{base}#{schema['$anchor']}"] = schema
            self._known[id(schema)] = schema, base
            if isinstance(schema.get("$ref"), str):
                self._unresolved.append((schema, base))
            waiting += ((each, base) for each in _children(schema))

    def _target(self, document: str, fragment: str) -> Any:
        """Find what a reference names; True, which allows anything, if that is not here."""
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{document}#{fragment}", True)
        found = self._named.get(document, True)
        for part in unquote(fragment).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                return True
        return found

    def _needs(self, schema: Schema) -> Iterator[Any]:
        """Yield what must end before the schema can: a schema; a list, all of which must; a tuple,
        one of which must.
        """
        if id(schema) in self._targets:
            yield self._targets[id(schema)]
        yield from _list(schema, "allOf")
        for name in ("anyOf", "oneOf"):
            if _list(schema, name):
                yield tuple(_list(schema, name))
        if "type" in schema and not {"const", "enum"} & schema.keys():
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            yield tuple(_needs_of_type(schema, each) for each in types) or True


def _has_end(need: Any, waiting: Collection[int]) -> bool:
    if isinstance(need, dict):
        return id(need) not in waiting
    if isinstance(need, list):
        return all(_has_end(each, waiting) for each in need)
    if isinstance(need, tuple):
        return any(_has_end(each, waiting) for each in need)
    return need is not False


def _needs_of_type(schema: Schema, kind: object) -> list[Any]:
    if kind == "object":
        return [*_required(schema)]
    if kind == "array" and (least := _least(schema, "minItems")):
        lists = [*_list(schema, "prefixItems"), *_list(schema, "items")]
        rest = schema.get("items", True)
        is_longer = least > len(lists) and not isinstance(rest, list)
        return lists[: int(min(least, len(lists)))] + [rest] * is_longer
    return []


def _required(schema: Schema) -> Iterator[Any]:
    """Yield the schema of each value that an object must have."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    for name in _list(schema, "required"):
        yield properties.get(name, others) if isinstance(name, str) else True
    if _least(schema, "minProperties"):
        yield (*properties.values(), others)


def _children(schema: Schema) -> Iterator[Any]:
    yield from (schema[name] for name in ONE if name in schema)
    for name in LISTS:
        yield from _list(schema, name)
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()


def _list(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _least(schema: Schema, name: str) -> float:
    found = schema.get(name)
    return found if isinstance(found, int | float) else 0
