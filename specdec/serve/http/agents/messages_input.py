"""POST /v1/messages as a chat request: Anthropic's Messages.

Types of blocks and tools are those of the anthropic package (types/). Results of tools come in
messages of the user and are messages of their own here, before the user's text.
"""

import json
from collections.abc import Mapping

from specdec.serve.http.agents.deferred_tools import result_texts, shown_tools
from specdec.serve.http.agents.translation import (
    Json,
    Knows,
    Translation,
    content_of,
    required_text,
    text_of,
    texts_of,
    with_one_system,
)
from specdec.serve.http.api_request import integer
from specdec.serve.http.errors import MESSAGES, ApiError
from specdec.serve.http.fields import COUNT_TOKENS

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
TEXT = ("text",)
# an agent puts it before its prompt, different in each request: no prompt would be found in a cache
BILLING = "x-anthropic-billing-header"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "disabled")
WANTED_CHOICE = '{"type": "auto", "any", "none", or "tool" with a name}'


def translated(body: Mapping[str, object], knows: Knows, *, is_count: bool = False) -> Translation:
    """Translate a message; ApiError names what is wrong. is_count: only its tokens are counted."""
    found = Translation(NAMES)
    given = found.take(COUNT_TOKENS if is_count else MESSAGES, body)
    found.body["messages"] = _messages(given, found)
    _take_prefill(found)
    if not is_count:
        limit = integer(given, "max_tokens", 1, 1 << 31)
        if limit is None:
            raise ApiError(400, "max_tokens is missing", "max_tokens")
        found.body["max_tokens"] = limit
    stops = given.get("stop_sequences", [])
    if not isinstance(stops, list):
        raise ApiError(400, f"stop_sequences={stops!r:.200}: give a list of texts")
    if stops:
        found.body["stop"] = stops
    _take_tools(given, found)
    _take_output(given.get("output_config", {}), found, knows)
    _take_thinking(given.get("thinking", {"type": None}), found, knows)
    return found


def _messages(given: Mapping[str, object], found: Translation) -> list[Json]:
    messages: list[Json] = []
    system = texts_of(given.get("system"), "system", TEXT)
    texts = [text for text in system if not text.startswith(BILLING)]
    if len(texts) < len(system):
        found.ignore(BILLING)
    if texts:
        messages.append({"role": "system", "content": "\n\n".join(texts)})
    turns = given.get("messages")
    if not isinstance(turns, list) or not turns:
        raise ApiError(400, f"messages={turns!r:.200}: give a list of messages")
    for i, turn in enumerate(turns):
        place = f"messages[{i}]"
        role = turn.get("role") if isinstance(turn, dict) else None
        if role == "assistant":
            messages.append(_assistant(turn.get("content"), place))
        elif role in ("user", "system"):
            messages += _user(turn.get("content"), place, role)
        else:
            raise ApiError(400, f"{place}.role={role!r:.100}: give user, assistant or system")
    return with_one_system(messages)


def _user(content: object, place: str, role: str) -> list[Json]:
    """Put results of tools before the text."""
    results: list[Json] = []
    texts = []
    if not isinstance(content, list):
        return [{"role": role, "content": content_of(texts_of(content, f"{place}.content", TEXT))}]
    for i, block in enumerate(content):
        here = f"{place}.content[{i}]"
        if isinstance(block, dict) and block.get("type") == "tool_result" and role == "user":
            result = result_texts(block.get("content"), f"{here}.content")
            call_id = required_text(block, "tool_use_id", here)
            message = {"role": "tool", "tool_call_id": call_id, "content": content_of(result)}
            results.append(message)
        else:
            texts.append(text_of(block, here, TEXT))
    return [*results, {"role": role, "content": content_of(texts)}] if texts else results


def _assistant(content: object, place: str) -> Json:
    texts, thoughts, calls = [], [], []
    if not isinstance(content, list):
        texts = texts_of(content, f"{place}.content", TEXT)
        content = []
    for i, block in enumerate(content):
        here = f"{place}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(required_text(block, "thinking", here))
        elif kind == "tool_use":
            calls.append(_call(block, here))
        elif kind != "redacted_thinking":  # which nobody but its author can read
            texts.append(text_of(block, here, TEXT))
    # none beside calls: some templates write these only where there is no content
    said = content_of(texts) if texts or not calls else None
    message: Json = {"role": "assistant", "content": said}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json, place: str) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{place}.input={arguments!r:.200}: give an object")
    return {
        "id": required_text(block, "id", place),
        "type": "function",
        "function": {
            "name": required_text(block, "name", place),
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _take_prefill(found: Translation) -> None:
    """Begin the answer with a last message of the assistant."""
    messages = found.body["messages"]
    assert isinstance(messages, list)
    if messages and messages[-1]["role"] == "assistant":
        found.body |= {"continue_final_message": True, "add_generation_prompt": False}


def _take_tools(given: Mapping[str, object], found: Translation) -> None:
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError(400, f"tools={tools!r:.200}: give a list of tools")
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else 0
        if not isinstance(kind, str | None):
            raise ApiError(400, f"tools[{i}]={tool!r:.200}: give a tool")
    kept = []
    for tool in shown_tools(tools, given["messages"]):
        kind = tool.get("type")
        if kind in ("custom", None):
            named = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
            text = {"description": tool["description"]} if tool.get("description") else {}
            kept.append({"type": "function", "function": {**named, **text}})
        else:
            found.ignore(f"tools.{kind}")
    if kept:
        found.body["tools"] = kept
    choice = given.get("tool_choice")
    if choice is not None:
        _take_choice(choice, found)


def _take_choice(choice: object, found: Translation) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("tool", *CHOICES):
        raise ApiError(400, f"tool_choice={choice!r:.200}: give {WANTED_CHOICE}")
    if kind == "tool":
        function = {"name": choice.get("name")}
        found.body["tool_choice"] = {"type": "function", "function": function}
    else:
        found.body["tool_choice"] = CHOICES[str(kind)]
    is_single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise ApiError(400, "tool_choice: disable_parallel_tool_use is true or false")
    found.body["parallel_tool_calls"] = not is_single


def _take_output(config: object, found: Translation, knows: Knows) -> None:
    if not isinstance(config, dict):
        raise ApiError(400, f'output_config={config!r:.200}: give {{"effort": ..., "format": ...}}')
    found.take_effort(config.get("effort"), "output_config.effort", knows)
    form = config.get("format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(form, dict) or form.get("type") != "json_schema" or schema is None:
            wanted = 'give {"type": "json_schema", "schema": ...}'
            raise ApiError(400, f"output_config.format={form!r:.200}: {wanted}", "output_config")
        described = {"type": "json_schema", "json_schema": {"schema": schema}}
        found.body["response_format"] = described
    for name in set(config) - {"effort", "format"}:
        found.ignore(f"output_config.{name}")


def _take_thinking(thinking: object, found: Translation, knows: Knows) -> None:
    kind = thinking.get("type") if isinstance(thinking, dict) else 0
    if kind is None:
        return
    if kind not in THINKING:
        allowed = ", ".join(THINKING)
        raise ApiError(400, f"thinking={thinking!r:.200}: give a type of {allowed}")
    if not knows("enable_thinking"):
        found.ignore("thinking")
        return
    given = found.body.setdefault("chat_template_kwargs", {})
    if isinstance(given, dict):  # anything else is refused later
        found.body["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **given}
