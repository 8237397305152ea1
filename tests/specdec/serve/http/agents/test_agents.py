"""Requests of two coding agents are answered: OpenAI's Codex CLI and Anthropic's Claude Code.

The fixtures were not captured from these programs. They are built after the request formats that
are published for them (the sources of Codex, wire formats of Claude Code that users have written
down): their fields, headers, tools and items, with texts of our own in place of the prompts.
"""

import json
from pathlib import Path

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

FIXTURES = Path(__file__).parent / "fixtures"
AGENTS = {
    "codex": ("/v1/responses", "max_output_tokens", ResponseStreamEvent, Response),
    "claude_code": ("/v1/messages?beta=true", "max_tokens", RawMessageStreamEvent, Message),
}
IGNORED = {
    "codex": {
        *("client_metadata", "include", "reasoning.summary", "text.verbosity"),
        *("tools.custom", "tools.web_search"),
    },
    "claude_code": {
        *("context_management", "tools.web_search_20250305", "x-anthropic-billing-header"),
    },
}


def fixture(name):
    return json.loads((FIXTURES / f"{name}.json").read_text())


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("name", AGENTS)
def test_a_request_of_an_agent_is_answered(thinker, name, is_stream):
    path, limit, event_type, whole_type = AGENTS[name]
    given = fixture(name)
    body = {**given["body"], limit: 8, "stream": is_stream}
    found = thinker.post(path, body, headers=given["headers"])
    assert found.status_code == 200, found.text
    assert set(found.headers["x-specdec-ignored"].split(", ")) == IGNORED[name]
    if not is_stream:
        whole_type.model_validate(found.json())
        return
    events = found.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        kind, data = event.split("\n")
        loaded = json.loads(data.removeprefix("data: "))
        TypeAdapter(event_type).validate_python(loaded)
        assert kind == f"event: {loaded['type']}"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_sees_its_own_limit_cut_to_the_context(thinker, name):
    path, limit, _, _ = AGENTS[name]
    given = fixture(name)
    body = {**given["body"], limit: 32000, "stop": ["e"], "stop_sequences": ["e"], "stream": False}
    found = thinker.post(path, body, headers=given["headers"])
    assert found.status_code == 200, found.text


def test_tokens_of_an_agent_are_counted(thinker):
    given = fixture("claude_code")
    names = ("model", "messages", "system", "tools", "thinking")
    body = {name: given["body"][name] for name in names}
    path = "/v1/messages/count_tokens?beta=true"
    found = thinker.post(path, body, headers=given["headers"])
    assert found.json()["input_tokens"] > 100


def test_a_name_that_is_ignored_is_logged_once(thinker, caplog):
    caplog.set_level("INFO", "specdec.serve")
    for _ in range(2):
        body = {"input": "def", "max_output_tokens": 1, "never_heard_of": 1}
        assert thinker.post("/v1/responses", body).status_code == 200
    lines = [each.getMessage() for each in caplog.records if "never_heard_of" in each.getMessage()]
    assert lines == ["/v1/responses: ignored never_heard_of (each is named once)"]
