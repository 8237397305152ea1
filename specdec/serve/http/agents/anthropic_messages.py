"""POST /v1/messages, Anthropic's Messages: a chat request of its body, and its answer's events.

Types of blocks, tools and events are those of the anthropic package (types/). Results of tools come
in messages of the user and are messages of their own here, before the user's text. The items of an
answer are blocks: thinking, text, a use of a tool.

A tool with `defer_loading` is left out of the prompt until the result of a search refers to it, by
a block of type tool_reference. All are shown if the server was to search: nothing would find them.
"""

import json
import uuid
from collections.abc import Iterator, Mapping

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.agents.event_answer import Counts, Kind, Script
from specdec.serve.http.agents.events import Arguments, Content, Reasoning
from specdec.serve.http.agents.translation import (
    REFERENCE,
    Json,
    Knows,
    Translation,
    call_of,
    checked,
    content_of,
    text_in,
    text_of,
    texts_of,
    with_one_system,
)
from specdec.serve.http.errors import MESSAGES, ApiError
from specdec.serve.http.fields import COUNT_TOKENS

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
TEXT, RESULT = ("text",), ("text", REFERENCE)
SERVER_SEARCH = "tool_search_tool"  # kinds of tools that would search on the server begin so
# an agent puts it before its prompt, different in each request: no prompt would be found in a cache
BILLING = "x-anthropic-billing-header"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "disabled")
WANTED_CHOICE = '{"type": "auto", "any", "none", or "tool" with a name}'
# of each kind of block: the field of its text, and the type and the field of its deltas
KINDS: dict[Kind, tuple[str, str, str]] = {
    Content: ("text", "text_delta", "text"),
    Reasoning: ("thinking", "thinking_delta", "thinking"),
    Arguments: ("input", "input_json_delta", "partial_json"),
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def translated(body: Mapping[str, object], knows: Knows, *, is_count: bool = False) -> Translation:
    """Translate a message; ApiError names what is wrong. is_count: only its tokens are counted."""
    found = Translation(NAMES, knows)
    given = found.take(COUNT_TOKENS if is_count else MESSAGES, body)
    references: set[str] = set()
    messages = _messages(given, found, references)
    found.body["messages"] = messages
    if messages and messages[-1]["role"] == "assistant":  # the answer goes on with it
        found.body |= {"continue_final_message": True, "add_generation_prompt": False}
    if not is_count:
        if "max_tokens" not in given:
            raise ApiError(400, "max_tokens is missing", "max_tokens")
        found.body["max_tokens"] = given["max_tokens"]
    stops = checked(given.get("stop_sequences", []), list, "stop_sequences", "a list of texts")
    if stops:
        found.body["stop"] = stops
    _take_tools(given.get("tools", []), found, references)
    if given.get("tool_choice") is not None:
        _take_choice(given["tool_choice"], found)
    _take_output(given.get("output_config", {}), found)
    _take_thinking(given.get("thinking", {"type": None}), found)
    return found


def _messages(given: Mapping[str, object], found: Translation, references: set[str]) -> list[Json]:
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
            messages += _user(turn.get("content"), place, role, references)
        else:
            raise ApiError(400, f"{place}.role={role!r:.100}: give user, assistant or system")
    return with_one_system(messages)


def _user(content: object, place: str, role: str, references: set[str]) -> list[Json]:
    """Put results of tools before the text."""
    results: list[Json] = []
    texts = []
    if not isinstance(content, list):
        return [{"role": role, "content": content_of(texts_of(content, f"{place}.content", TEXT))}]
    for i, block in enumerate(content):
        here = f"{place}.content[{i}]"
        if isinstance(block, dict) and block.get("type") == "tool_result" and role == "user":
            parts = block.get("content")
            result = texts_of(parts, f"{here}.content", RESULT)
            if isinstance(parts, list):
                references |= {part["tool_name"] for part in parts if part["type"] == REFERENCE}
            call_id = text_in(block, "tool_use_id", here)
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
            thoughts.append(text_in(block, "thinking", here))
        elif kind == "tool_use":
            arguments = checked(block.get("input"), dict, f"{here}.input", "an object")
            calls.append(call_of(block, "id", json.dumps(arguments, ensure_ascii=False), here))
        elif kind != "redacted_thinking":  # which nobody but its author can read
            texts.append(text_of(block, here, TEXT))
    # none beside calls: some templates write these only where there is no content
    message: Json = {"role": "assistant", "content": content_of(texts)}
    if calls and not texts:
        message["content"] = None
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _take_tools(given: object, found: Translation, references: set[str]) -> None:
    tools: list[Json] = checked(given, list, "tools", "a list of tools")
    kinds = [tool.get("type") if isinstance(tool, dict) else 0 for tool in tools]
    for i, kind in enumerate(kinds):
        if not isinstance(kind, str | None):
            raise ApiError(400, f"tools[{i}]={tools[i]!r:.200}: give a tool")
    shows_all = any(str(kind).startswith(SERVER_SEARCH) for kind in kinds)
    kept = []
    for i, tool in enumerate(tools):
        if not shows_all and _waits(tool, f"tools[{i}]", references):
            continue
        if kinds[i] not in ("custom", None):
            found.ignore(f"tools.{kinds[i]}")
            continue
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description"):
            function["description"] = tool["description"]
        kept.append({"type": "function", "function": function})
    if kept:
        found.body["tools"] = kept


def _waits(tool: Json, place: str, references: set[str]) -> bool:
    """Tell whether a tool has to be found before it is shown."""
    waits = tool.get("defer_loading", False)
    waits = checked(waits, bool, f"{place}.defer_loading", "true or false")
    return waits and text_in(tool, "name", place) not in references


def _take_choice(choice: object, found: Translation) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("tool", *CHOICES):
        raise ApiError(400, f"tool_choice={choice!r:.200}: give {WANTED_CHOICE}")
    function = {"type": "function", "function": {"name": choice.get("name")}}
    is_single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise ApiError(400, "tool_choice: disable_parallel_tool_use is true or false")
    found.body["tool_choice"] = function if kind == "tool" else CHOICES[str(kind)]
    found.body["parallel_tool_calls"] = not is_single


def _take_output(given: object, found: Translation) -> None:
    config = checked(given, dict, "output_config", '{"effort": ..., "format": ...}')
    found.take_effort(config.get("effort"), "output_config.effort")
    form = config.get("format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(form, dict) or form.get("type") != "json_schema" or schema is None:
            wanted = 'give {"type": "json_schema", "schema": ...}'
            raise ApiError(400, f"output_config.format={form!r:.200}: {wanted}", "output_config")
        found.body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    for name in set(config) - {"effort", "format"}:
        found.ignore(f"output_config.{name}")


def _take_thinking(thinking: object, found: Translation) -> None:
    kind = thinking.get("type") if isinstance(thinking, dict) else 0
    if kind is None:
        return
    if kind not in THINKING:
        allowed = ", ".join(THINKING)
        raise ApiError(400, f"thinking={thinking!r:.200}: give a type of {allowed}")
    if not found.knows("enable_thinking"):
        found.ignore("thinking")
        return
    given = found.body.get("chat_template_kwargs", {})
    if isinstance(given, dict):  # anything else is refused later
        found.body["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **given}


class MessagesScript(Script):
    def __init__(self, model: str) -> None:
        message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        super().__init__(message, "content")

    def begin(self, counts: Counts) -> Iterator[Json]:
        self.answer["usage"] = _usage(counts)
        yield {"type": "message_start", "message": dict(self.answer)}

    def begin_item(self, kind: Kind, name: str) -> Iterator[Json]:
        block: Json = {"type": KINDS[kind][0], KINDS[kind][0]: ""}
        if kind is Reasoning:
            block["signature"] = ""
        elif kind is Arguments:
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self.items.append(block)
        yield self._event("start", content_block=dict(block))

    def delta(self, kind: Kind, text: str) -> Json:
        _, name, field = KINDS[kind]
        return self._event("delta", delta={"type": name, field: text})

    def end_item(self, kind: Kind) -> Iterator[Json]:
        """End a block. Arguments that are no JSON are shown as what they are."""
        whole = arguments_object(self.text) if kind is Arguments else self.text
        self.items[-1][KINDS[kind][0]] = whole
        yield self._event("stop")

    def end(self, reason: str, stop: str | int | None, counts: Counts) -> Iterator[Json]:
        yield from self.end_last()
        ends: Json = {"stop_reason": REASONS[reason], "stop_sequence": None}
        if isinstance(stop, str) and reason != "length":
            ends = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        self.answer |= {**ends, "usage": _usage(counts)}
        yield {"type": "message_delta", "delta": ends, "usage": _usage(counts)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Json]:
        yield error.anthropic_body()

    def _event(self, what: str, **fields: object) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.items) - 1, **fields}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.num_prompt - counts.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.num_cached,
        "output_tokens": counts.num_output,
        "output_tokens_details": {"thinking_tokens": counts.num_reasoning},
    }
