"""POST /v1/responses as a chat request: OpenAI's Responses without stored state.

Types of items and tools are those of the openai package (types/responses). Consecutive reasoning,
text and calls of the assistant are one message.
"""

import json
from collections.abc import Mapping

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.agents.translation import (
    Json,
    Knows,
    Translation,
    call_of,
    checked,
    content_of,
    text_in,
    texts_of,
    with_one_system,
)
from specdec.serve.http.errors import ApiError
from specdec.serve.http.fields import RESPONSES

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
PARTS = ("reasoning", "content", "tool_calls")  # of an assistant's message, in their order
FUNCTION = ("name", "description", "parameters", "strict")


def translated(body: Mapping[str, object], knows: Knows) -> Translation:
    """Translate a request; ApiError names what is wrong."""
    found = Translation(NAMES, knows)
    given = found.take(RESPONSES, body)
    if "input" not in given:
        raise ApiError(400, "input is missing", "input")
    found.body["messages"] = _messages(given)
    if "max_output_tokens" in given:
        found.body["max_tokens"] = given["max_output_tokens"]
    _take_tools(given, found)
    _take_text(given.get("text", {}), found)
    reasoning = checked(given.get("reasoning", {}), dict, "reasoning", '{"effort": ...}')
    found.take_effort(reasoning.get("effort"), "reasoning.effort")
    for name, value in reasoning.items():
        if name != "effort" and value is not None:
            found.ignore(f"reasoning.{name}")
    if given.get("include"):
        found.ignore("include")
    if given.get("truncation", "disabled") != "disabled":
        found.ignore("truncation")
    return found


def _messages(given: Mapping[str, object]) -> list[Json]:
    messages: list[Json] = []
    if "instructions" in given:
        texts = texts_of(given["instructions"], "instructions", TEXTS)
        messages.append({"role": "system", "content": content_of(texts)})
    items = given["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ApiError(400, f"input={items!r:.200}: give text or a list of items")
    for i, item in enumerate(items):
        _add(messages, checked(item, dict, f"input[{i}]", "an item"), f"input[{i}]")
    return with_one_system(messages)


def _add(messages: list[Json], item: Json, place: str) -> None:
    kind = item.get("type", "message")
    match kind:
        case "message":
            _add_message(messages, item, place)
        case "reasoning":
            texts = texts_of(item.get("content") or item.get("summary"), place, TEXTS)
            if texts:
                _assistant(messages, "reasoning")["reasoning"] = "\n".join(texts)
        case "function_call":
            # a model that wrote no JSON object gets its arguments back as a text
            arguments = arguments_object(text_in(item, "arguments", place))
            _add_call(messages, item, json.dumps(arguments, ensure_ascii=False), place)
        case "custom_tool_call":
            arguments = {"input": text_in(item, "input", place)}
            _add_call(messages, item, json.dumps(arguments), place)
        case "function_call_output" | "custom_tool_call_output":
            output = texts_of(item.get("output"), f"{place}.output", TEXTS)
            call_id = text_in(item, "call_id", place)
            message = {"role": "tool", "tool_call_id": call_id, "content": content_of(output)}
            messages.append(message)
        case _:
            raise ApiError(400, f"{place}: type {kind!r:.100} is not supported")


def _add_message(messages: list[Json], item: Json, place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role={role!r:.100}: give {', '.join(ROLES)}")
    content = content_of(texts_of(item.get("content"), f"{place}.content", TEXTS))
    if role == "assistant":
        _assistant(messages, "content")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[Json], item: Json, arguments: str, place: str) -> None:
    call = call_of(item, "call_id", arguments, place)
    calls = _assistant(messages, "tool_calls").setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(call)


def _assistant(messages: list[Json], adds: str) -> Json:
    """Return the assistant's last message if this part still belongs to it, else a new one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    later = PARTS[PARTS.index(adds) + (adds == "tool_calls") :]
    if last is None or any(last.get(name) for name in later):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _take_tools(given: Mapping[str, object], found: Translation) -> None:
    functions: list[Json] = []
    for i, tool in enumerate(checked(given.get("tools", []), list, "tools", "a list of tools")):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise ApiError(400, f"tools[{i}]={tool!r:.200}: give a tool with a type")
        if kind == "function":
            functions.append({name: tool[name] for name in FUNCTION if tool.get(name) is not None})
        else:
            found.ignore(f"tools.{kind}")
    choice, allowed = _choice(given.get("tool_choice"))
    kept = [each for each in functions if allowed is None or str(each.get("name")) in allowed]
    if kept:
        found.body["tools"] = [{"type": "function", "function": each} for each in kept]
    if choice is not None:
        found.body["tool_choice"] = choice
    if "parallel_tool_calls" in given:
        found.body["parallel_tool_calls"] = given["parallel_tool_calls"]


def _choice(given: object) -> tuple[object, set[str] | None]:
    """Return the choice, and the names of the tools that are allowed, if not all are."""
    if not isinstance(given, dict):
        return given, None
    if given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}, None
    tools = given.get("tools")
    if given.get("type") == "allowed_tools" and isinstance(tools, list):
        names = (each.get("name") for each in tools if isinstance(each, dict))
        return given.get("mode", "auto"), {name for name in names if isinstance(name, str)}
    raise ApiError(400, f"tool_choice={given!r:.200}: only functions can be called")


def _take_text(given: object, found: Translation) -> None:
    text = checked(given, dict, "text", '{"format": ...}')
    if text.get("verbosity", "medium") not in ("medium", None):
        found.ignore("text.verbosity")
    form = text.get("format")
    if form is None or form == {"type": "text"}:
        return
    if isinstance(form, dict) and form.get("type") == "json_schema":
        if not isinstance(form.get("schema"), dict):
            wanted = 'give {"type": "json_schema", "name": ..., "schema": {...}}'
            raise ApiError(400, f"text.format={form!r:.200}: {wanted}", "text")
        schema = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    found.body["response_format"] = form
