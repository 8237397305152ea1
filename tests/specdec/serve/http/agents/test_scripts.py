"""Every event that a script writes is one of its API's, as the clients' own types say."""

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specdec.serve.http.agents.anthropic_messages import MessagesScript
from specdec.serve.http.agents.event_answer import Counts
from specdec.serve.http.agents.events import Arguments, Call, Content, Reasoning
from specdec.serve.http.agents.openai_responses import ResponsesScript
from specdec.serve.http.answers import finish_reason
from specdec.serve.http.errors import ApiError

OPENAI = TypeAdapter(ResponseStreamEvent)
ANTHROPIC = TypeAdapter(RawMessageStreamEvent)
COUNTS = Counts(num_prompt=9, num_cached=4, num_output=7, num_reasoning=2)
EVENTS = [
    *(Reasoning("I "), Reasoning("look.")),
    *(Content("So"), Content(".")),
    *(Call(0, "now"), Arguments(0, "{"), Arguments(0, "}")),
    *(Call(1, "weather"), Arguments(1, '{"city": '), Arguments(1, '"Bonn"}')),
    Content("Done"),
]


def played(script, events, reason="stop", stop_reason=None):
    """All events of an answer."""
    has_calls = any(isinstance(event, Call) for event in events)
    written = list(script.begin(COUNTS))
    written += [each for event in events for each in script.write(event)]
    return written + list(script.end(finish_reason(reason, has_calls), stop_reason, COUNTS))


def responses(**body):
    return ResponsesScript(body, "demo", {"temperature": 1.0, "top_p": 1.0})


def item(kind, num_deltas, *, has_parts=True):
    """The events of one item of a response."""
    part = ["content_part"] if has_parts else []
    added = ["output_item.added", *[f"{each}.added" for each in part]]
    done = [f"{kind}.done", *[f"{each}.done" for each in part], "output_item.done"]
    return [*added, *[f"{kind}.delta"] * num_deltas, *done]


RESPONSES_TYPES = [
    *("created", "in_progress"),
    *item("reasoning_text", 2),
    *item("output_text", 2),
    *item("function_call_arguments", 2, has_parts=False) * 2,
    *item("output_text", 1),
    "completed",
]


def test_a_response_grows_item_by_item():
    script = responses(instructions="Be brief.", metadata={"a": "b"}, store=True)
    written = played(script, EVENTS)
    for event in written:
        OPENAI.validate_python(event, strict=True)
    assert [event["type"].removeprefix("response.") for event in written] == RESPONSES_TYPES
    assert [event["sequence_number"] for event in written] == list(range(len(written)))
    response = Response.model_validate(script.whole(), strict=True)
    assert written[-1]["response"] == script.whole()
    assert written[0]["response"]["output"] == []
    assert response.output_text == "So.Done"
    assert [item.type for item in response.output] == [
        *("reasoning", "message", "function_call", "function_call", "message"),
    ]
    assert {item.status for item in response.output} == {"completed"}
    assert response.output[3].arguments == '{"city": "Bonn"}'
    assert response.output[2].call_id != response.output[3].call_id
    assert len({item.id for item in response.output}) == 5
    assert (response.status, response.instructions, response.store) == (
        *("completed", "Be brief."),
        False,
    )
    assert response.usage.total_tokens == 16
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_deltas_join_to_the_items_of_a_response():
    written = played(responses(), EVENTS)
    done = [event["item"] for event in written if event["type"] == "response.output_item.done"]
    joined = {}
    for event in written:
        if event["type"].endswith(".delta"):
            position = event["output_index"]
            joined[position] = joined.get(position, "") + event["delta"]
            assert event["item_id"] == done[position]["id"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in done]
    assert [joined[i] for i in range(5)] == texts


def test_a_response_that_is_cut_is_incomplete():
    script = responses()
    written = played(script, EVENTS[:3], "length")
    OPENAI.validate_python(written[-1], strict=True)
    assert written[-1]["type"] == "response.incomplete"
    assert script.whole()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in script.whole()["output"]] == ["completed", "incomplete"]


def test_an_empty_response_has_an_empty_message():
    script = responses()
    for event in played(script, []):
        OPENAI.validate_python(event, strict=True)
    assert Response.model_validate(script.whole()).output_text == ""
    assert len(script.whole()["output"]) == 1


def test_a_response_that_fails_keeps_what_it_has():
    script = responses()
    list(script.begin(COUNTS))
    list(script.write(Content("a")))
    [event] = script.fail(ApiError(500, "no"))
    OPENAI.validate_python(event, strict=True)
    assert (event["type"], event["response"]["error"]["message"]) == ("response.failed", "no")


MESSAGE_TYPES = [
    "message_start",
    *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop")
    * 4,
    *("content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
]


def test_a_message_grows_block_by_block():
    script = MessagesScript("demo")
    written = played(script, EVENTS)
    for event in written:
        ANTHROPIC.validate_python(event, strict=True)
    assert [event["type"] for event in written] == MESSAGE_TYPES
    deltas = [event["delta"]["type"] for event in written if "index" in event and "delta" in event]
    kinds = ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert deltas == [kind for kind in kinds for _ in range(2)] + ["text_delta"]
    message = AnthropicMessage.model_validate(script.whole(), strict=True)
    assert [block.type for block in message.content] == [
        *("thinking", "text", "tool_use", "tool_use", "text"),
    ]
    assert message.content[0].thinking == "I look."
    assert [block.input for block in message.content[2:4]] == [{}, {"city": "Bonn"}]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == 9
    assert message.usage.output_tokens_details.thinking_tokens == 2
    assert written[-2]["usage"] == script.whole()["usage"]


@pytest.mark.parametrize(
    "events, reason, stop_reason, expected",
    [
        ([Content("a")], "stop", None, ("end_turn", None)),
        ([Content("a")], "stop", 7, ("end_turn", None)),
        ([Content("a")], "stop", "END", ("stop_sequence", "END")),
        ([Content("a")], "length", None, ("max_tokens", None)),
        (EVENTS, "stop", None, ("tool_use", None)),
        (EVENTS, "length", None, ("max_tokens", None)),
        ([], "stop", None, ("end_turn", None)),
    ],
)
def test_a_message_says_why_it_stopped(events, reason, stop_reason, expected):
    script = MessagesScript("demo")
    written = played(script, events, reason, stop_reason)
    found = script.whole()
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    assert written[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_arguments_that_are_no_json_are_shown_as_they_are():
    script = MessagesScript("demo")
    played(script, [Call(0, "now"), Arguments(0, '{"a": ')], "length")
    assert script.whole()["content"][0]["input"] == {"INVALID_JSON": '{"a": '}


def test_a_message_that_fails_ends_with_an_error():
    [event] = MessagesScript("demo").fail(ApiError(503, "the server is shutting down"))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the server is shutting down"},
    }
