"""Tools and reasoning over HTTP: what the openai package gets, whole and as a stream."""

import json
import random

import jsonschema
import pytest

from tests.specdec.serve.http.tool_templates import TEMPLATES, THINKING

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "now", "description": "The time."}},
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "def"}]
REQUEST = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "seed": 5}


@pytest.fixture(
    scope="module",
    params=[
        "llama3_json",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("hermes", "qwen3_xml")),
    ],
)
def server(serve, request):
    with serve(chat_template=TEMPLATES[request.param]) as found:
        yield found


@pytest.fixture(scope="module")
def hermes(serve):
    with serve(chat_template=TEMPLATES["hermes"]) as found:
        yield found


@pytest.fixture(scope="module")
def thinker(serve):
    with serve(chat_template=THINKING) as found:
        yield found


def client_of(live):
    return live.openai()


def joined(chunks, index=0):
    """Content, reasoning, calls and finish reason of one choice of a stream."""
    content, reasoning, calls, reason = "", "", [], None
    for choice in (c for chunk in chunks for c in chunk.choices if c.index == index):
        assert reason is None, "something after the end"
        delta = choice.delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning") or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason
    return content, reasoning, calls, reason


def of_message(choice):
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    reasoning = message.model_extra.get("reasoning") or ""
    return message.content or "", reasoning, calls, choice.finish_reason


@pytest.mark.parametrize(
    "choice",
    [pytest.param("required", marks=pytest.mark.slow), NAMED],
    ids=["required", "named"],
)
def test_a_call_that_must_be_made_is_made_whole_and_streamed(server, choice):
    client = client_of(server)
    fields = {**REQUEST, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields)
    found = of_message(whole.choices[0])
    content, _, [[name, arguments]], reason = found
    assert (content, reason) == ("", "tool_calls")
    assert whole.choices[0].message.content is None
    assert name in ("now", "weather") if choice == "required" else name == "weather"
    jsonschema.validate(
        json.loads(arguments), WEATHER if name == "weather" else {"maxProperties": 0}
    )
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert joined(chunks) == found
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_call_that_max_tokens_cuts_off_is_no_content(hermes):
    client = client_of(hermes)
    fields = {**REQUEST, "tool_choice": NAMED, "max_tokens": 6}
    whole = client.chat.completions.create(**fields)
    assert of_message(whole.choices[0]) == ("", "", [], "length")
    assert joined(client.chat.completions.create(**fields, stream=True)) == ("", "", [], "length")
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "tool_choice": {"type": "any"}}
    body["tools"] = [{"name": "weather", "input_schema": WEATHER}]
    assert hermes.post("/v1/messages", body).json()["content"] == []


def test_samples_have_their_own_calls(hermes):
    client = client_of(hermes)
    fields = {**REQUEST, "tool_choice": NAMED, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    for index in (0, 1):
        assert joined(chunks, index) == of_message(whole.choices[index])
        tokens = [
            token.token
            for chunk in chunks
            for c in chunk.choices
            if c.index == index and c.logprobs
            for token in c.logprobs.content
        ]
        assert tokens == [each.token for each in whole.choices[index].logprobs.content]


def test_a_model_that_may_call_calls_or_answers(hermes):
    """The demo model calls by itself where all but the first token of a call is unlikely."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    [bracket] = hermes.post("/tokenize", {"prompt": "<", "add_special_tokens": False}).json()[
        "tokens"
    ]
    for bias, reason in (({str(bracket): 100}, "tool_calls"), ({str(bracket): -100}, "stop")):
        body = {**REQUEST, "response_format": form, "logit_bias": bias}
        body["parallel_tool_calls"] = False
        [choice] = hermes.post(CHAT, body).json()["choices"]
        assert choice["finish_reason"] == reason
        if reason == "stop":
            assert choice["message"]["content"] in ("true", "false")
            assert "tool_calls" not in choice["message"]


def prompt_of(live, **fields):
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **fields}
    found = live.post(CHAT, body)
    assert found.status_code == 200, found.text
    ids = found.json()["choices"][0]["prompt_token_ids"]
    return live.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_a_conversation_with_calls_and_results_reaches_the_template(hermes):
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}},
        {
            "id": "call_2",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
        },
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
    ]
    text = prompt_of(hermes, messages=messages, tools=TOOLS)
    assert text.endswith(
        'assistant: \n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        "tool: noon\ntool: rain\nassistant: "
    )
    assert json.dumps(TOOLS[1]) in text


def test_an_answer_can_be_sent_back_as_it_came(server):
    found = server.post(CHAT, {**REQUEST, "tool_choice": NAMED}).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": found["tool_calls"][0]["id"], "content": "rain"}
    body = {**REQUEST, "messages": [*MESSAGES, found, result], "max_tokens": 1}
    assert server.post(CHAT, body).status_code == 200


def test_a_request_that_may_not_call_shows_the_template_no_tools(hermes, live):
    assert "Tools:" in prompt_of(hermes, tools=TOOLS)
    assert "Tools:" not in prompt_of(hermes, tools=TOOLS, tool_choice="none")
    assert prompt_of(live, tools=TOOLS, tool_choice="none")
    tokens = hermes.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()["tokens"]
    assert "Tools:" in hermes.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_reasoning_has_a_field_of_its_own(thinker):
    client = client_of(thinker)
    fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**fields)
    message = whole.choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] != ""
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert joined(chunks) == of_message(whole.choices[0])
    plain = client.chat.completions.create(**fields, reasoning_effort="none")
    assert plain.choices[0].message.content


def test_what_was_reasoned_can_be_sent_back(thinker):
    back = {"role": "assistant", "content": None, "reasoning": "hm"}
    found = thinker.post(CHAT, {"messages": [*MESSAGES, back], "max_tokens": 1})
    assert found.status_code == 200, found.text


def test_a_schema_holds_for_the_answer_after_the_reasoning(thinker):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    body = {"messages": MESSAGES, "response_format": form, "max_tokens": 9}
    [choice] = thinker.post(CHAT, body).json()["choices"]
    assert choice["message"]["reasoning"]  # which the demo model would not end
    found = thinker.post(CHAT, {**body, "reasoning_effort": "none"})
    [choice] = found.json()["choices"]
    assert choice["message"]["content"] in ("true", "false")
    # a grammar that is no schema begins at once
    body = {"messages": MESSAGES, "guided_choice": ["yes", "no"], "max_tokens": 60}
    [choice] = thinker.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    "template, effort, text",
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "minimal", "True"),
    ],
)
def test_the_effort_reaches_a_template_that_reads_it(trusting, template, effort, text):
    assert prompt_of(trusting, chat_template=template, reasoning_effort=effort) == text


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
BAD = {"type": "function", "function": {"name": "bad", "parameters": BAD_SCHEMA}}
ENDLESS_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
ENDLESS = {"type": "function", "function": {"name": "bad", "parameters": ENDLESS_SCHEMA}}
FORMAT = {"type": "json_object"}
MISTAKES = [
    ({"tools": [ENDLESS, *TOOLS], "tool_choice": "required"}, "tools", "tools[0]: parameters of"),
    ({"tool_choice": {**NAMED, "function": {"name": "x"}}}, "tool_choice", "no tool is named 'x'"),
    ({"tools": [*TOOLS, BAD], "tool_choice": "required"}, "tools", "tools[2]: parameters of 'bad'"),
    ({"tools": [{"type": "web_search"}]}, "tools", "only function is supported"),
    ({"tool_choice": "required", "response_format": FORMAT}, "response_format", "must be a call"),
    ({"guided_regex": "a"}, "guided_regex", "give one, or tool_choice none"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reads neither"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "allowed are none, minimal"),
    ({"ignore_eos": True, "tool_choice": "required"}, "ignore_eos", "ends where its grammar does"),
]


@pytest.mark.parametrize("fields, param, words", MISTAKES, ids=[str(m[0])[:50] for m in MISTAKES])
def test_a_mistake_is_a_400_that_names_the_field(hermes, fields, param, words):
    for stream in (False, True):
        found = hermes.post(CHAT, {**REQUEST, **fields, "stream": stream})
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


def test_tools_that_cannot_be_called_are_refused(live, serve):
    found = live.post(CHAT, REQUEST)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tools")
    assert "knows no tools" in found.json()["error"]["message"]
    with serve(chat_template=TEMPLATES["hermes"], tool_call_parser="none") as mute:
        found = mute.post(CHAT, REQUEST)
    assert found.status_code == 400
    assert "--tool-call-parser" in found.json()["error"]["message"]


HOSTILE = [
    *(None, True, 7, "x", "", [], {}, [[]], [{}], [None], {"": {}}, "\ud800", "[" * 5000),
    *([BAD], [{**BAD, "function": {"name": "a", "parameters": {"$ref": "#"}}}]),
    [{**BAD, "function": {"name": "a", "parameters": {"properties": {"$ref": {"$ref": "#/x"}}}}}],
    [{**BAD, "function": {"name": "a", "parameters": {"properties": 5, "required": 7}}}],
    [{**BAD, "function": {"name": "a", "parameters": {"properties": {"a>b": {"enum": [1, "x"]}}}}}],
    {"type": "function", "function": None},
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"arguments": "[" * 9000}}],
        }
    ],
    [{"role": "assistant", "content": None, "tool_calls": {"function": 1}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": "7"}}]}],
    [{"role": "tool", "content": None}],
]


@pytest.mark.slow
def test_hostile_tools_and_messages_are_answered_or_refused_by_all(server):
    be_hostile(server)


def test_hostile_tools_and_messages_are_answered_or_refused(hermes):
    be_hostile(hermes)


def be_hostile(server):
    chance = random.Random(2)
    names = ("tools", "tool_choice", "parallel_tool_calls", "messages", "reasoning_effort")
    for name in names:
        for value in HOSTILE:
            choice = chance.choice(["auto", "required"])
            body = {**REQUEST, "tool_choice": choice, "max_tokens": 2, name: value}
            headers = {"Content-Type": "application/json"}
            found = server.post(CHAT, content=json.dumps(body), headers=headers)
            assert found.status_code in (200, 400), (body, found.text)
    server.until_idle()
