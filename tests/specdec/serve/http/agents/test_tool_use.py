"""Tools and choices of a request are taken, or an error names the field; results get names."""

import pytest

from specdec.serve.http.agents.tool_use import tool_use, with_names


def tool(name="now", **more):
    return {"type": "function", "function": {"name": name, **more}}


NOW, WEATHER = tool(), tool("weather", description="", parameters={}, strict=True)


@pytest.mark.parametrize(
    "fields, choice, named, most, possible",
    [
        ({}, "none", None, None, []),
        ({"tools": []}, "none", None, None, []),
        ({"tools": [], "tool_choice": "auto"}, "none", None, None, []),
        ({"tools": [NOW]}, "auto", None, None, ["now"]),
        ({"tools": [NOW], "tool_choice": "none"}, "none", None, None, []),
        ({"tools": [NOW, WEATHER], "tool_choice": "required"}, "required", None, None, 2),
        ({"tools": [NOW, WEATHER], "parallel_tool_calls": False}, "auto", None, 1, 2),
        ({"tools": [NOW, WEATHER], "tool_choice": NOW}, "required", "now", 1, ["now"]),
    ],
)
def test_what_an_answer_may_call(fields, choice, named, most, possible):
    use = tool_use(fields)
    assert (use.choice, use.named, use.most) == (choice, named, most)
    names = [each.name for each in use.possible]
    assert possible in (names, len(names))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tools": {}}, "tools={}: give a list"),
        ({"tools": ["now"]}, "tools[0] is 'now': give"),
        ({"tools": [NOW] * 513}, "at most 512 tools"),
        ({"tools": [NOW, {"type": "web_search"}]}, "tools[1]: type 'web_search' given, only func"),
        ({"tools": [{"function": {"name": "now"}}]}, "tools[0] is {'function'"),
        ({"tools": [{**NOW, "name": "now"}]}, "tools[0] is {'type'"),
        ({"tools": [tool(name=None)]}, "tools[0].function.name=None: give 1 to 128"),
        ({"tools": [tool(name='a"b')]}, "tools[0].function.name='a\"b': give 1 to 128"),
        ({"tools": [tool(strikt=True)]}, "tools[0].function: unknown 'strikt'; known are"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description of 'now': give text"),
        ({"tools": [tool(parameters=[])]}, "tools[0] 'now': parameters=[]: give the JSON schema"),
        ({"tools": [tool(parameters={"type": "string"})]}, "give the JSON schema of an object"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice='any': give none, auto, required or"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice={'type'"),
        ({"tools": [NOW], "tool_choice": WEATHER}, "no tool is named 'weather'; there are now"),
        ({"tool_choice": "required"}, "tool_choice='required' without tools: give tools too"),
        ({"tool_choice": NOW}, "no tool is named 'now'; there are none"),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls=1: give True or False"),
    ],
)
def test_a_mistake_is_named(fields, words):
    with pytest.raises(ValueError, match=r"tool") as error:
        tool_use(fields)
    assert words in str(error.value)


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
