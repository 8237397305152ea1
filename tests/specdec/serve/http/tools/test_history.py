"""Results of tools get the names of their calls."""

import pytest

from specdec.serve.http.tools.history import with_names

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
]
ASKED = {"role": "assistant", "content": None, "tool_calls": CALLS}


def result(call_id, **more):
    return {"role": "tool", "tool_call_id": call_id, "content": "x", **more}


def test_results_are_named_by_their_calls():
    messages = [ASKED, result("b"), result("a", name="own"), result("c"), {"role": "user"}]
    found = with_names(messages)
    assert [each.get("name") for each in found] == [None, "weather", "own", None, None]
    assert "name" not in messages[1]


@pytest.mark.parametrize(
    "messages",
    [
        *(None, "x", [], [5], [{}], [{"tool_calls": 5}], [{"tool_calls": [5, {}]}]),
        [{"tool_calls": [{"id": [], "function": {"name": "n"}}]}, {"role": "tool"}],
        [{"tool_calls": [{"id": "a", "function": {"name": []}}]}, {"tool_call_id": []}],
    ],
)
def test_what_is_no_message_is_left_alone(messages):
    assert with_names(messages) == messages
