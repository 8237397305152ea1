"""/openapi.json and /docs say what the server does. Other tests' exchanges are checked by it too.

See described.py: what the clients of the tests send and get follows the description.
"""

import anthropic
import pytest
from jsonschema import Draft202012Validator

from specdec.serve.http.errors import MESSAGES
from specdec.serve.http.fields import (
    ANY,
    CHAT,
    COMPLETION,
    COUNT_TOKENS,
    FIELDS,
    PROMPTS,
    RESPONSES,
    TEXT,
    TOKENIZE,
    TOOLS,
    integer,
    number,
    one_of,
    text,
)
from specdec.serve.http.gate import PAGE_PATHS
from specdec.serve.http.openapi import words
from tests.specdec.serve.http.test_playground import Page

KEY = "sk-one"
PAGES = ["/openapi.json", "/docs"]
TURNS = [{"role": "user", "content": "def"}]
GOOD = {
    CHAT: {"messages": TURNS, "max_tokens": 1},
    COMPLETION: {"prompt": "def", "max_tokens": 1},
    RESPONSES: {"input": "def", "max_output_tokens": 1},
    MESSAGES: {"messages": TURNS, "max_tokens": 1},
}
LIMITED = [
    (route, name, limit, field.schema[limit] + step)
    for route in GOOD
    for name, field in FIELDS[route].items()
    for limit, step in (("minimum", -1), ("maximum", 1))
    if limit in field.schema
]


@pytest.fixture(scope="module")
def document(live):
    """What the server says of itself."""
    return live.get("/openapi.json").json()


def test_it_describes_every_route_and_no_other(live, document):
    served = {
        (each.path.replace(":path", ""), method)
        for each in live.server.application.app.routes
        for method in getattr(each, "methods", ())
        if method not in ("HEAD", "OPTIONS")
    }
    described = {
        (path, method.upper()) for path, each in document["paths"].items() for method in each
    }
    assert served - described == {*((path, "GET") for path in PAGE_PATHS), ("/ping", "POST")}
    assert described <= served


def test_its_schemas_are_json_schemas_and_have_every_field(live, document):
    assert document == live.described.document
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for route, fields in FIELDS.items():
        content = document["paths"][route]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert set(schemas[name]["properties"]) == set(fields)


def test_what_the_clients_send_follows_it(live):
    with live.openai() as ours:
        ours.chat.completions.create(model="demo", messages=TURNS, max_tokens=1)
        ours.completions.create(model="demo", prompt="def", max_tokens=1)
        ours.responses.create(model="demo", input="def", max_output_tokens=1)
    http = anthropic.DefaultHttpxClient(event_hooks=live.described.hooks())
    given = {"api_key": "none", "max_retries": 0, "http_client": http}
    live.described.asked.clear()
    with anthropic.Anthropic(base_url=live.url, **given) as theirs:
        theirs.messages.create(model="demo", messages=TURNS, max_tokens=1)
        theirs.messages.count_tokens(model="demo", messages=TURNS)
    assert live.described.asked == {MESSAGES, COUNT_TOKENS}


@pytest.mark.parametrize("path, body", GOOD.items())
@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, None),
        ({"temperature": None}, None),
        ({"temperature": "hot"}, "$.temperature"),
        ({"stop": ["x"] * 33}, "$.stop"),
        ({"messages": None, "prompt": 5, "input": None}, "$"),
    ],
)
def test_it_finds_what_the_server_refuses(live, path, body, change, problem):
    known = {name: value for name, value in change.items() if name in FIELDS[path]}
    found = live.described.problems(path, {**body, **known})
    assert bool(found) == (problem is not None)
    assert all(each.startswith(problem) for each in found)
    status = live.post(path, {**body, **known}).status_code
    assert status == (200 if problem is None else 400)


def test_an_exchange_that_is_not_as_described_fails(live):
    found = live.post(CHAT, {"messages": 5})
    live.described.check(found)
    found._content = found.content.replace(b'"message"', b'"massage"')
    with pytest.raises(AssertionError):
        live.described.check(found)


@pytest.mark.parametrize("route, name, limit, value", LIMITED)
def test_a_value_beyond_a_limit_is_refused(live, route, name, limit, value):
    body = {**GOOD[route], name: value}
    assert any(name in each for each in live.described.problems(route, body))
    assert live.post(route, body).status_code == 400


def test_unknown_fields_are_refused_or_ignored_as_it_says(live, serve):
    for path, body in GOOD.items():
        given = {**body, "no_such_field": 1}
        is_refused = live.described.problems(path, given) != []
        assert is_refused == (path in (CHAT, COMPLETION))
        assert live.post(path, given).status_code == (400 if is_refused else 200)
    with serve(ignore_unknown=True) as lenient:
        given = {**GOOD[CHAT], "no_such_field": 1}
        assert lenient.described.problems(CHAT, given) == []


def test_the_page_has_every_field_and_loads_nothing_foreign(live):
    found = live.get("/docs")
    assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Page(found.text)
    assert page.inline == []
    assert set(page.loaded) <= PAGE_PATHS
    assert "<script" not in found.text
    parts = found.text.split("<h2>POST ")[1:]
    for part in parts:
        path = part.partition("<")[0]
        assert all(f"<code>{name}</code>" in part for name in FIELDS[path])
        ending = "ignored" if path in (RESPONSES, MESSAGES, COUNT_TOKENS) else "refused"
        assert f"Unknown fields are {ending}." in part
    assert len(parts) == len(FIELDS)


@pytest.mark.parametrize(
    "schema, said",
    [
        (ANY, "anything"),
        (TEXT, "text"),
        (text(9), "text of at most 9 characters"),
        (integer(1, 5), "integer from 1 to 5"),
        (number(0), "number, at least 0"),
        (integer(), "integer"),
        (one_of("a", None), '"a", null'),
        (PROMPTS, "text, or list of (integer, at least 0), or list of (text, or list of ("),
        (TOOLS, "list of (object of type, function), at most 512"),
        (FIELDS[TOKENIZE]["parse_special"].schema, "true or false"),
        (FIELDS[TOKENIZE]["chat_template_kwargs"].schema, "object"),
    ],
)
def test_a_schema_in_words(schema, said):
    assert words(schema).startswith(said)


@pytest.mark.parametrize("path", PAGES)
def test_both_obey_the_key_and_the_policy(live, serve, path):
    assert live.get(path).headers["content-security-policy"] == "default-src 'self'"
    with serve(api_key=KEY) as locked:
        assert locked.get(path).status_code == 401
        found = locked.get(path, headers={"x-api-key": KEY})
        assert found.status_code == 200
        if path == "/openapi.json":
            assert found.json()["security"] == [{"bearer": []}, {"header": []}]
