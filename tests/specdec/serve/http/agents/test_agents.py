"""Requests of two coding agents are answered: OpenAI's Codex CLI and Anthropic's Claude Code.

The fixtures are recorded requests (Codex CLI 0.169.0 and Claude Code 2.1.330, each run without a
terminal): method, path, headers, fields, types and order are as the agent sent them, without the
headers of the connection. Texts are shortened and replaced by our own, ids by neutral ones. Each is
the agent's second request, after a call of a tool. In `claude_code`, for a model unknown to the
agent, a system message follows the user's; in `claude_code_tool_search` the call was of the agent's
search for deferred tools.
"""

import json
from pathlib import Path

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

FIXTURES = Path(__file__).parent / "fixtures"
OF_RESPONSES = ("max_output_tokens", ResponseStreamEvent, Response)
OF_MESSAGES = ("max_tokens", RawMessageStreamEvent, Message)
AGENTS = {
    "codex": OF_RESPONSES,
    "claude_code": OF_MESSAGES,
    "claude_code_tool_search": OF_MESSAGES,
}
IGNORED = {
    "codex": {
        *("client_metadata", "include", "reasoning.summary"),
        *("tools.namespace", "tools.web_search"),
    },
    "claude_code": {"context_management", "x-anthropic-billing-header"},
    "claude_code_tool_search": {"context_management", "x-anthropic-billing-header"},
}


def fixture(name):
    return json.loads((FIXTURES / f"{name}.json").read_text())


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("name", AGENTS)
def test_a_request_of_an_agent_is_answered(namer, name, is_stream):
    limit, event_type, whole_type = AGENTS[name]
    given = fixture(name)
    body = {**given["body"], limit: 8, "stream": is_stream}
    found = namer.post(given["path"], body, headers=given["headers"])
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
def test_an_agent_sees_its_own_limit_cut_to_the_context(namer, name):
    limit, _, _ = AGENTS[name]
    given = fixture(name)
    body = {**given["body"], limit: 32000, "stop": ["e"], "stop_sequences": ["e"], "stream": False}
    found = namer.post(given["path"], body, headers=given["headers"])
    assert found.status_code == 200, found.text


def test_tokens_of_an_agent_are_counted(namer):
    given = fixture("claude_code")
    names = ("model", "messages", "system", "tools", "thinking")
    body = {name: given["body"][name] for name in names}
    path = "/v1/messages/count_tokens?beta=true"
    found = namer.post(path, body, headers=given["headers"])
    assert found.json()["input_tokens"] > 100


def test_a_name_that_is_ignored_is_logged_once(thinker, caplog):
    caplog.set_level("INFO", "specdec.serve")
    for _ in range(2):
        body = {"input": "def", "max_output_tokens": 1, "never_heard_of": 1}
        assert thinker.post("/v1/responses", body).status_code == 200
    lines = [each.getMessage() for each in caplog.records if "never_heard_of" in each.getMessage()]
    assert lines == ["/v1/responses: ignored never_heard_of (each is named once)"]
