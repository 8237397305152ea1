"""The openai and anthropic packages against the routes of agents."""

import json

import anthropic
import httpx2
import jsonschema
import openai
import pytest

from specdec.serve.http.errors import ApiError

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "def"}]
SEED = {"seed": 5}
QUIET = {"effort": "none"}
FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
NAMED = {"type": "function", "name": "weather"}
TOOL = {"name": "weather", "input_schema": WEATHER}
OFF = {"type": "disabled"}
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]
LONG = [{"role": "user", "content": "x = 1\n" * 2000}]


@pytest.fixture(scope="module")
def ours(thinker):
    with thinker.openai() as found:
        yield found


@pytest.fixture(scope="module")
def theirs(thinker):
    http = anthropic.DefaultHttpxClient(event_hooks=thinker.described.hooks())
    given = {"api_key": "none", "max_retries": 0, "http_client": http}
    with anthropic.Anthropic(base_url=thinker.url, **given) as found:
        yield found


def of_chat(ours, **fields):
    """The same request to /v1/chat/completions."""
    return ours.chat.completions.create(model="demo", messages=CHAT, seed=5, **fields)


def test_a_response_is_the_answer_of_chat(ours):
    expected = of_chat(ours, max_tokens=12, reasoning_effort="none")
    found = ours.responses.create(
        model="demo", input="def", max_output_tokens=12, reasoning=QUIET, extra_body=SEED
    )
    assert found.output_text == expected.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.usage.output_tokens == 12


def test_a_response_reasons_and_streams(ours):
    fields = {"model": "demo", "input": "def", "max_output_tokens": 12, "extra_body": SEED}
    whole = ours.responses.create(**fields)
    [item] = whole.output
    assert item.type == "reasoning"
    expected = of_chat(ours, max_tokens=12).choices[0].message.model_extra["reasoning"]
    assert item.content[0].text == expected
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= 12
    with ours.responses.stream(**fields) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == expected
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].content[0].text == expected


def test_text_that_might_have_begun_a_tag_comes_at_the_end(ours, theirs, thinker):
    [bracket] = thinker.post("/tokenize", {"prompt": "<", "add_special_tokens": False}).json()[
        "tokens"
    ]
    extra = {"extra_body": {"logit_bias": {str(bracket): 100}, "temperature": 0}}
    found = ours.responses.create(model="demo", input="def", max_output_tokens=3, **extra)
    assert found.output[0].content[0].text == "<<<"
    with theirs.messages.stream(model="demo", max_tokens=3, messages=CHAT, **extra) as stream:
        assert stream.get_final_message().content[0].thinking == "<<<"


def test_a_response_calls(ours):
    fields = {
        "model": "demo",
        "input": "def",
        "reasoning": QUIET,
        "tools": [FUNCTION],
        "tool_choice": NAMED,
        "extra_body": SEED,
    }
    with ours.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [call] = final.output
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    deltas = [
        each.delta for each in events if each.type == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    back = [*CHAT, call.model_dump(exclude_none=True), result]
    fields |= {"input": back, "tool_choice": "none", "max_output_tokens": 2}
    again = ours.responses.create(**fields)
    assert again.usage.output_tokens == 2


def test_a_response_follows_a_schema(ours):
    form = {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}, "strict": True}
    found = ours.responses.create(
        model="demo", input="def", reasoning=QUIET, text={"format": form}, extra_body=SEED
    )
    assert found.output_text in ("true", "false")
    assert found.status == "completed"


def test_a_message_is_the_answer_of_chat(ours, theirs):
    expected = of_chat(ours, max_tokens=12, reasoning_effort="none")
    found = theirs.messages.create(
        model="demo", max_tokens=12, messages=CHAT, thinking=OFF, extra_body=SEED
    )
    assert found.content[0].text == expected.choices[0].message.content
    assert found.stop_reason == "max_tokens"
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == 12


def test_a_message_stops_where_it_is_told(ours, theirs):
    fields = {"model": "demo", "max_tokens": 60, "messages": CHAT, "thinking": OFF}
    stop = of_chat(ours, max_tokens=12, reasoning_effort="none").choices[0].message.content[-4:]
    with theirs.messages.stream(**fields, stop_sequences=[stop], extra_body=SEED) as stream:
        text = "".join(stream.text_stream)
        found = stream.get_final_message()
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert stop not in text
    assert found.content[0].text == text


def test_a_message_thinks(theirs):
    fields = {"model": "demo", "max_tokens": 12, "messages": CHAT, "extra_body": SEED}
    whole = theirs.messages.create(**fields)
    [block] = whole.content
    assert block.type == "thinking"
    with theirs.messages.stream(**fields) as stream:
        thoughts = "".join(event.thinking for event in stream if event.type == "thinking")
        assert stream.get_final_message().content == whole.content
    assert thoughts == block.thinking


def test_a_message_calls(theirs):
    fields = {"model": "demo", "max_tokens": 120, "thinking": OFF, "tools": [TOOL]}
    choice = {"type": "tool", "name": "weather"}
    with theirs.messages.stream(
        **fields, messages=CHAT, tool_choice=choice, extra_body=SEED
    ) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        found = stream.get_final_message()
    [block] = found.content
    jsonschema.validate(block.input, WEATHER)
    assert json.loads("".join(partial)) == block.input
    assert (found.stop_reason, block.name) == ("tool_use", "weather")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    turns = [
        *CHAT,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result]},
    ]
    again = theirs.messages.create(
        **{**fields, "max_tokens": 2}, messages=turns, tool_choice={"type": "none"}
    )
    assert again.usage.output_tokens == 2


def test_an_answer_that_was_begun_is_continued(theirs, thinker):
    begun = [*CHAT, {"role": "assistant", "content": "def f(x):"}]
    found = theirs.messages.create(model="demo", max_tokens=4, messages=begun, extra_body=SEED)
    body = {"messages": begun, "max_tokens": 4, "seed": 5, "add_generation_prompt": False}
    expected = thinker.post("/v1/chat/completions", {**body, "continue_final_message": True})
    assert found.content[0].text == expected.json()["choices"][0]["message"]["content"]


def test_tokens_are_counted(theirs):
    fields = {"model": "demo", "messages": CHAT, "system": "Be kind.", "thinking": OFF}
    found = theirs.messages.count_tokens(**fields)
    usage = theirs.messages.create(**fields, max_tokens=1).usage
    assert found.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    more = theirs.messages.count_tokens(**fields, tools=[TOOL])
    assert more.input_tokens > found.input_tokens


def test_errors_are_those_of_the_clients(ours, theirs):
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        ours.responses.create(model="demo", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        ours.responses.create(model="other", input="x")
    with pytest.raises(anthropic.NotFoundError) as error:
        theirs.messages.create(model="other", messages=CHAT, max_tokens=1)
    assert error.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="type 'image' given") as error:
        theirs.messages.create(model="demo", messages=IMAGE, max_tokens=1)
    assert error.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        theirs.messages.create(model="demo", messages=LONG, max_tokens=1)


def test_a_failure_within_a_stream_is_its_last_event(thinker, monkeypatch):
    def fail(output, api_request):
        if len(output.outputs[0].token_ids) > 4:
            raise ApiError(500, "the engine has stopped")

    monkeypatch.setattr("specdec.serve.http.generating._raise_failure", fail)
    body = {"messages": CHAT, "input": "def", "stream": True, "temperature": 0}
    for path, limit in (("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")):
        given = {name: value for name, value in body.items() if name in ("stream", "temperature")}
        source = "input" if path == "/v1/responses" else "messages"
        text = thinker.post(path, {**given, source: body[source], limit: 40}).text
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert last["type"] in ("response.failed", "error")
        assert "the engine has stopped" in json.dumps(last)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "def", "ignore_eos": True}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2000, "ignore_eos": True}),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_request(thinker, path, body, is_stream):
    engine = thinker.llm.llm.engine
    if is_stream:
        with httpx2.stream("POST", thinker.url + path, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()  # the connection is closed when this is collected
            assert next(lines).startswith("event: ")
            assert engine.has_unfinished
    else:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(thinker.url + path, json=body, timeout=0.3)
    thinker.until_idle()
