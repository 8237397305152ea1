"""Requests of agents' APIs as chat requests: what every kind of item and block becomes."""

import json

import pytest

from specdec.serve.http.agents import anthropic_messages, openai_responses
from specdec.serve.http.errors import ApiError

CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "name": "now", "description": "d", "parameters": {}, "strict": None}
PARAMETERS = {"type": "object", "properties": {}}


def responses(knows=(), **body):
    return openai_responses.translated({"input": "hi", **body}, lambda name: name in knows)


def messages(knows=(), **body):
    given = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **body}
    return anthropic_messages.translated(given, lambda name: name in knows)


def call(name="now", arguments='{"a": 1}', call_id="c1"):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def part(kind, text):
    return {"type": kind, "text": text}


ITEMS = [
    ("hi", [{"role": "user", "content": "hi"}]),
    ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    (
        [
            {"type": "message", "role": "developer", "content": [part("input_text", "Be kind.")]},
            {"role": "system", "content": [part("input_text", "a"), part("input_text", "b")]},
            {"role": "user", "content": [part("input_text", "a"), part("input_text", "b")]},
        ],
        [
            {"role": "system", "content": "Be kind.\n\na\nb"},
            {"role": "user", "content": [part("text", "a"), part("text", "b")]},
        ],
    ),
    (
        [
            {"type": "reasoning", "summary": [], "content": [part("reasoning_text", "hm")]},
            {"role": "assistant", "content": [{**part("output_text", "So"), "annotations": []}]},
            CALL,
            {**CALL, "call_id": "c2", "arguments": "{"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [part("input_text", "late")],
            },
            {"type": "reasoning", "summary": [part("summary_text", "ok")], "content": None},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "Really."},
        ],
        [
            {
                "role": "assistant",
                "content": "So",
                "reasoning": "hm",
                "tool_calls": [call(), call(arguments='{"INVALID_JSON": "{"}', call_id="c2")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {"role": "tool", "tool_call_id": "c2", "content": "late"},
            {"role": "assistant", "content": "No.", "reasoning": "ok"},
            {"role": "assistant", "content": "Really."},
        ],
    ),
    (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": ""},
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("patch", '{"input": "*** Begin"}')],
            },
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ],
    ),
    (
        [
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"role": "user", "content": ""},
        ],
        [{"role": "user", "content": ""}],
    ),
]


@pytest.mark.parametrize("items, expected", ITEMS)
def test_items_become_messages(items, expected):
    assert responses(input=items).body["messages"] == expected


def test_fields_of_responses_become_those_of_chat():
    form = {"type": "json_schema", "name": "a", "schema": {}, "strict": True}
    found = responses(
        ("enable_thinking",),
        instructions="Be kind.",
        max_output_tokens=7,
        tools=[TOOL, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
        tool_choice={"type": "function", "name": "now"},
        parallel_tool_calls=False,
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        stream=True,
        seed=3,
        store=True,
        metadata={"a": "b"},
        client_metadata={},
        user=None,
    )
    assert found.body == {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 7,
        "tools": [
            {"type": "function", "function": {"name": "now", "description": "d", "parameters": {}}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "now"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {}, "strict": True},
        },
        "reasoning_effort": "low",
        "stream": True,
        "seed": 3,
    }
    assert found.ignored == [
        *("client_metadata", "tools.web_search", "tools.custom", "text.verbosity"),
        *("reasoning.summary", "include"),
    ]
    assert found.headers() == {"X-Specdec-Ignored": ", ".join(found.ignored)}
    assert responses().headers() == {}
    assert responses(reasoning={"effort": "low"}).ignored == ["reasoning.effort"]


def test_only_allowed_tools_are_given():
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "now"}],
    }
    found = responses(tools=[TOOL, {**TOOL, "name": "then"}], tool_choice=choice).body
    assert [each["function"]["name"] for each in found["tools"]] == ["now"]
    assert found["tool_choice"] == "required"


def test_a_strange_name_does_not_reach_a_header():
    found = responses(**{"a\r\nSet-Cookie: b": 1, "é": 2, "x" * 99: 3})
    assert found.headers() == {"X-Specdec-Ignored": "(a strange name)"}
    assert len(responses(**{f"a{i}": 1 for i in range(99)}).headers()["X-Specdec-Ignored"]) < 200


WRONG_RESPONSES = [
    ({"input": None}, "input", "input is missing"),
    ({"input": []}, "input", "give text or a list of items"),
    ({"input": [5]}, "input", r"input\[0\]=5"),
    ({"input": [{"role": "tool", "content": ""}]}, "input", r"input\[0\].role='tool'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference' is not supp"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        r"input\[0\].content\[0\]: type 'input_image' given",
    ),
    ({"input": [{**CALL, "call_id": None}]}, "input", r"input\[0\].call_id=None: give text"),
    ({"previous_response_id": "r"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "c"}, "conversation", "send the whole conversation"),
    ({"background": True}, "background", "not stored"),
    ({"prompt": {"id": "p"}}, "prompt", "send the text"),
    ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions has it"),
    ({"max_output_tokens": 0}, "max_output_tokens", "an integer from 1"),
    ({"tools": {}}, "tools", "give a list"),
    ({"tools": [{"name": "now"}]}, "tools", r"tools\[0\]="),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "only functions"),
    ({"text": "x"}, "text", "give"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text", '"schema": {'),
    ({"reasoning": "high"}, "reasoning", "give"),
]


@pytest.mark.parametrize("body, param, words", WRONG_RESPONSES)
def test_a_mistake_in_responses_is_named(body, param, words):
    with pytest.raises(ApiError, match=words) as error:
        responses(**body)
    assert (error.value.status, error.value.param) == (400, param)


def test_what_asks_for_no_effect_is_taken():
    assert responses(background=False, top_logprobs=0, previous_response_id=None).ignored == []


def test_errors_of_chat_have_the_names_of_the_route():
    renamed = responses().renamed(ApiError(400, "response_format: no"))
    assert (renamed.message, renamed.param) == ("text.format: no", "text.format")
    plain = ApiError(400, "seed='x': no")
    assert responses().renamed(plain) is plain


TURNS = [
    ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    (
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}}],
            }
        ],
        [{"role": "assistant", "content": None, "tool_calls": [call()]}],
    ),
    ([{"role": "assistant", "content": []}], [{"role": "assistant", "content": ""}]),
    (
        [
            {"role": "user", "content": [{**part("text", "hi"), "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    part("text", "So"),
                    {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "noon"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [part("text", "a"), part("text", "b")],
                        "is_error": True,
                    },
                    part("text", "and?"),
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
        ],
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "So",
                "reasoning": "hm",
                "tool_calls": [call()],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [part("text", "a"), part("text", "b")],
            },
            {"role": "user", "content": "and?"},
            {"role": "tool", "tool_call_id": "c3", "content": ""},
        ],
    ),
]


@pytest.mark.parametrize("turns, expected", TURNS)
def test_turns_become_messages(turns, expected):
    assert messages(messages=turns).body["messages"] == expected


def test_the_systems_texts_are_one_message_without_an_agents_billing():
    system = [
        part("text", "x-anthropic-billing-header: a=b;"),
        part("text", "You are brief."),
        {**part("text", "And kind."), "cache_control": {"type": "ephemeral"}},
    ]
    turns = [{"role": "system", "content": "Really."}, {"role": "user", "content": "hi"}]
    found = messages(system=system, messages=turns)
    assert found.body["messages"] == [
        {"role": "system", "content": "You are brief.\n\nAnd kind.\n\nReally."},
        {"role": "user", "content": "hi"},
    ]
    assert found.ignored == ["x-anthropic-billing-header"]


def test_a_last_message_of_the_assistant_is_continued():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    found = messages(messages=turns).body
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in messages().body


def test_fields_of_messages_become_those_of_chat():
    found = messages(
        ("enable_thinking",),
        stop_sequences=["END"],
        temperature=0.5,
        top_k=4,
        stream=True,
        tools=[
            {"name": "now", "description": "d", "input_schema": PARAMETERS, "cache_control": {}},
            {"type": "custom", "name": "then", "input_schema": PARAMETERS},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={
            "effort": "high",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        metadata={"user_id": "a"},
        context_management={"edits": []},
    )
    functions = [{"name": "now", "description": "d"}, {"name": "then"}]
    assert found.body == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 4,
        "stream": True,
        "tools": [
            {"type": "function", "function": {**each, "parameters": PARAMETERS}}
            for each in functions
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "object"}},
        },
    }
    assert found.ignored == ["context_management", "tools.web_search_20250305"]


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_choices_become_those_of_chat(choice, expected):
    assert messages(tool_choice=choice).body["tool_choice"] == expected


def test_thinking_and_effort_are_ignored_where_the_template_knows_neither():
    found = messages(thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert found.ignored == ["output_config.effort", "thinking"]
    off = messages(("enable_thinking",), thinking={"type": "disabled"}).body
    assert off["chat_template_kwargs"] == {"enable_thinking": False}


REFERENCE = {"type": "tool_reference", "tool_name": "fetch"}
FOUND = {"type": "tool_result", "tool_use_id": "c1", "content": [REFERENCE]}
TOOLS = [
    {"name": "now", "input_schema": {}},
    {"name": "fetch", "input_schema": {}, "defer_loading": True},
    {"name": "write", "input_schema": {}, "defer_loading": True},
]


def test_a_deferred_tool_is_given_once_a_result_refers_to_it():
    before = messages(messages=[{"role": "user", "content": "hi"}], tools=TOOLS).body
    after = messages(**blocks(FOUND), tools=TOOLS).body
    names = [[tool["function"]["name"] for tool in body["tools"]] for body in (before, after)]
    assert names == [["now"], ["now", "fetch"]]
    assert after["messages"] == [{"role": "tool", "tool_call_id": "c1", "content": "fetch"}]


def test_deferred_tools_are_given_where_the_server_was_to_search_them():
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    found = messages(messages=[{"role": "user", "content": "hi"}], tools=[search, *TOOLS])
    assert len(found.body["tools"]) == 3
    assert found.ignored == [f"tools.{search['type']}"]


def blocks(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}]}


WRONG_MESSAGES = [
    ({"messages": None}, "messages", "give a list"),
    ({"messages": []}, "messages", "give a list"),
    ({"messages": ["hi"]}, "messages", r"messages\[0\].role=None"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages", r"messages\[0\].role='tool'"),
    (blocks({"type": "image", "source": {}}), "messages", "type 'image' given, read are text"),
    (blocks({"type": "document"}), "messages", "type 'document' given"),
    (blocks("hi"), "messages", r"messages\[0\].content\[0\]: type None"),
    (
        blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
        "messages",
        r"content\[0\].content\[0\]: type 'image'",
    ),
    (blocks({"type": "tool_result"}), "messages", "tool_use_id=None"),
    (blocks({**FOUND, "content": [{**REFERENCE, "tool_name": 5}]}), "messages", "tool_name=5"),
    (blocks({"type": "tool_use", "id": "c", "name": "n"}, role="assistant"), "messages", "input=N"),
    (blocks({"type": "thinking"}, role="assistant"), "messages", "thinking=None"),
    ({"max_tokens": None}, "max_tokens", "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens", "an integer from 1"),
    ({"system": [{"type": "image"}]}, "system", r"system\[0\]: type 'image'"),
    ({"stop_sequences": "END"}, "stop_sequences", "a list of texts"),
    ({"tools": [5]}, "tools", r"tools\[0\]=5"),
    ({"tools": [{"name": "now", "defer_loading": 1}]}, "tools", "defer_loading=1: give true or"),
    ({"tools": [{"name": [], "defer_loading": True}]}, "tools", r"tools\[0\].name=\[\]"),
    ({"tool_choice": "auto"}, "tool_choice", "give"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice", "true or"),
    ({"thinking": {"type": "much"}}, "thinking", "enabled, adaptive, disabled"),
    ({"thinking": True}, "thinking", "enabled, adaptive, disabled"),
    ({"output_config": 5}, "output_config", "give"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config", "json_schema"),
    ({"container": "c"}, "container", "nothing is run here"),
]


@pytest.mark.parametrize("body, param, words", WRONG_MESSAGES)
def test_a_mistake_in_messages_is_named(body, param, words):
    with pytest.raises(ApiError, match=words) as error:
        messages(**body)
    assert (error.value.status, error.value.param) == (400, param)


def test_arguments_are_sent_on_as_json():
    turn = {"type": "tool_use", "id": "c", "name": "now", "input": {"é": [1, None]}}
    found = messages(**blocks(turn, role="assistant")).body["messages"][0]
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == {"é": [1, None]}
