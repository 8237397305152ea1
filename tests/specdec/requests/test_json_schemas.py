"""What a schema may be, by what JSON Schema says of it."""

import json
import logging
import time

import pytest

from specdec.requests import json_schemas
from specdec.requests.json_schemas import SchemaError, prepared, prepared_text

SELF = {"$ref": "#"}


def needs(value, **more):
    """An object that must have `value`."""
    return {"type": "object", "properties": {"a": value}, "required": ["a"], **more}


ENDLESS = {
    "only itself": SELF,
    "a required property": needs(SELF),
    "a required property by name of none": needs({}, required=["b"], additionalProperties=SELF),
    "an item": {"type": "array", "items": SELF, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [SELF], "minItems": 1},
    "some property": {"type": "object", "minProperties": 1, "additionalProperties": SELF},
    "two definitions": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": needs({"$ref": "#/$defs/a"})},
    },
    "anywhere": {"$ref": "#/x/0", "x": [needs({"$ref": "#/x/0"})]},
    "each of several": {"anyOf": [SELF, needs(SELF), False]},
    "one of all": {"allOf": [{}, needs(SELF)]},
    "each type": needs(SELF, type=["object", "array"], minItems=2, items=SELF),
    "an anchor": {"$anchor": "a", **needs({"$ref": "#a"})},
    "its URI": {"$id": "http://a/b", **needs({"$ref": "b"})},
    "a URI within": {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", **needs(SELF)}}},
    "an escaped name": {"$ref": "#/$defs/a~1%25", "$defs": {"a/%": needs({"$ref": "#"})}},
}
ENDING = {
    "an optional property": {"type": "object", "properties": {"a": SELF}},
    "no item": {"type": "array", "items": SELF},
    "null": needs({"anyOf": [SELF, {"type": "null"}]}),
    "another type": needs(SELF, type=["object", "null"]),
    "any type": {"properties": {"a": SELF}, "required": ["a"]},
    "a value of a name": {"const": SELF},
    "a property of a name": needs({}, properties={"$ref": {}}),
    "a definition that nothing uses": needs({}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "another document": {"$ref": "https://example.com/a.json"},
    "what is not there": {"$ref": "#/$defs/none"},
}
CHAIN = {"$ref": "#/a/0", "a": {str(i): {"$ref": f"#/a/{i + 1}"} for i in range(3000)}}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_never_ends_in_a_value_is_refused(name):
    with pytest.raises(SchemaError, match="refers to itself and never ends in a value"):
        prepared(ENDLESS[name])


@pytest.mark.parametrize("name", ENDING)
def test_a_schema_that_can_end_is_taken_as_it_is(name):
    assert prepared(ENDING[name]) == ENDING[name]


def test_a_long_chain_takes_no_longer_than_its_length():
    began = time.process_time()
    prepared(CHAIN)
    with pytest.raises(SchemaError):
        prepared({**CHAIN, "a": {**CHAIN["a"], "3000": SELF}})
    assert time.process_time() - began < 1  # 0.06 s; if each link looked at all, minutes


def test_an_unknown_format_is_an_annotation_that_the_log_has_once(caplog, monkeypatch):
    monkeypatch.setattr(json_schemas, "_noted", set())
    caplog.set_level(logging.INFO, "specdec")
    schema = {
        "type": "object",
        "properties": {"format": {"format": "password"}, "day": {"format": "date"}},
        "additionalProperties": {"format": "int32"},
        "default": {"format": "password"},
        "$ref": "#/x",
        "x": {"format": "password"},
    }
    for _ in range(2):
        found = json.loads(prepared_text(json.dumps(schema)))
    assert found == {
        **schema,
        "properties": {"format": {}, "day": {"format": "date"}},
        "additionalProperties": {},
        "x": {},
    }
    assert [each.getMessage() for each in caplog.records] == [
        "a JSON schema has the format 'int32', which no text is held to",
        "a JSON schema has the format 'password', which no text is held to",
    ]


def test_names_of_formats_fill_no_log(caplog, monkeypatch):
    monkeypatch.setattr(json_schemas, "_noted", set())
    caplog.set_level(logging.INFO, "specdec")
    prepared({"allOf": [{"format": f"{i}\n" * 1000} for i in range(200)]})
    assert len(caplog.records) == json_schemas.MOST_NOTED
    assert all(len(each.getMessage()) < 200 for each in caplog.records)


@pytest.mark.parametrize("text", ["5", "[]", "{", "", '{"a": NaN}', '{"a": ' * 5000, "9" * 5000])
def test_what_is_no_schema_is_left_to_the_compiler(text):
    assert prepared_text(text) == text


BLANKS = [
    {"whitespace_flexible": False, "coerce_one_of": True},
    {"whitespace_pattern": r"[\x20\x0A\x0D\x09]+", "item_separator": ", ?", "key_separator": ": "},
    {"whitespace_pattern": " {0,3}|(\\n\\t*)?", "json_allowed_escapes": 'nrt"\\'},
    {},
    None,
]
WIDE = [
    ({"lenient": True}, "'lenient'=True: allowed are whitespace_flexible"),
    ({"lenient": False}, "allowed are"),
    ({"unknown": 1}, "allowed are"),
    ({"whitespace_pattern": "[a-z]*"}, "give a regex of JSON's own blanks"),
    ({"whitespace_pattern": "[^a]"}, "blanks"),
    ({"whitespace_pattern": "0*"}, "blanks"),
    ({"whitespace_pattern": "."}, "blanks"),
    ({"whitespace_pattern": " " * 101}, "100 parts"),
    ({"item_separator": "[;,]"}, "blanks"),
    ({"key_separator": ","}, "blanks"),
    ({"whitespace_flexible": "yes"}, "give true or false"),
]


@pytest.mark.parametrize("given", BLANKS)
def test_guidance_may_choose_blanks(given):
    schema = {"type": "object", "x-guidance": given}
    assert prepared(schema) == schema


@pytest.mark.parametrize("given, words", WIDE)
def test_guidance_may_choose_nothing_else(given, words):
    with pytest.raises(SchemaError, match=f"x-guidance: .*{words}"):
        prepared({"type": "object", "x-guidance": given})
