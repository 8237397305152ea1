"""Whatever a body holds, the routes of agents answer it or refuse it in their own form."""

import json
import random
import time

import pytest

from specdec.serve.http.agents import anthropic_messages, openai_responses
from specdec.serve.http.fields import FIELDS

VALUES = [
    *(None, True, False, 0, 1, -1, 2**70, 0.5, "", "x", "\ud800", "none", "{{ 1/0 }}"),
    *([], {}, [[]], [{}], [None], [5], {"type": None}, {"type": []}, {"type": {}}, {"": ""}),
    *([{"type": "message"}], [{"type": []}], [{"role": "user"}], [{"role": ["user"]}]),
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}],
    [{"role": "assistant", "content": ""}],
    [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "[" * 9000}],
    [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}],
    [{"type": "function", "name": "n", "parameters": {"type": "object", "properties": 5}}],
    [{"name": "n", "input_schema": {"$ref": "#/$defs/none"}}],
    {"type": "function", "name": "n"},
    {"type": "tool", "name": "n"},
    {"type": "allowed_tools", "tools": [5]},
    {"format": {"type": "json_schema", "schema": {"type": "no"}}},
    {"effort": "much"},
    {"effort": ["low"], "format": 5},
]
MESSAGES = ({"messages": [{"role": "user", "content": "def"}]}, "max_tokens")
ROUTES = {
    "/v1/responses": ({"input": "def"}, "max_output_tokens"),
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
}


def is_refusal(path, found):
    error = found.json()["error"]
    keys = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
    return found.status_code in (400, 404, 413) and set(error) == keys and error["message"]


@pytest.mark.parametrize("count", [3, pytest.param(len(VALUES), marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ROUTES)
def test_any_value_of_any_field_is_answered_or_refused(thinker, path, count):
    good, limit = ROUTES[path]
    names = sorted({*FIELDS[path], "unknown"} - {"stream"})
    chance = random.Random(path)
    headers = {"Content-Type": "application/json"}
    for name in names:
        for value in chance.sample(VALUES, count):
            if (name, value) == (limit, None):
                continue  # allowed: the answer goes to the end of the context
            body = json.dumps({**good, limit: 1, name: value})
            found = thinker.post(path, content=body, headers=headers)
            assert found.status_code == 200 or is_refusal(path, found), (body, found.text)
    thinker.until_idle()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"a":' * 900, b"\xff"])
def test_a_body_that_is_no_object_is_refused(thinker, path, body):
    found = thinker.post(path, content=body, headers={"Content-Type": "application/json"})
    assert is_refusal(path, found)


NAMES = [f"name_{i}" for i in range(20_000)]
MANY = {
    "fields": ("/v1/responses", {"input": "x", **dict.fromkeys(NAMES, 1)}),
    "fields of a message": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
            **dict.fromkeys(NAMES, 1),
        },
    ),
    "kinds of tools": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": name} for name in NAMES]},
    ),
    "kinds of a message's tools": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
            "tools": [{"type": name} for name in NAMES],
        },
    ),
    "fields of reasoning": ("/v1/responses", {"input": "x", "reasoning": dict.fromkeys(NAMES, 1)}),
    "allowed tools": (
        "/v1/responses",
        {
            "input": "x",
            "tools": [{"type": "function", "name": name} for name in NAMES],
            "tool_choice": {
                "type": "allowed_tools",
                "tools": [{"name": f"other_{name}"} for name in NAMES],
            },
        },
    ),
}
TRANSLATE = {
    "/v1/responses": openai_responses.translated,
    "/v1/messages": anthropic_messages.translated,
}


@pytest.mark.parametrize("name", MANY)
def test_many_names_are_translated_in_linear_time(name):
    path, body = MANY[name]
    start = time.process_time()
    found = TRANSLATE[path](body, lambda variable: True)
    assert time.process_time() - start < 0.5
    assert len(found.ignored) <= 256
    assert len(found.headers().get("X-Specdec-Ignored", "")) < 4000
