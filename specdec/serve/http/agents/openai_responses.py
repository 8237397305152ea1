"""POST /v1/responses, OpenAI's Responses without stored state: a chat request, and its events.

Types of items, tools and events are those of the openai package (types/responses). Consecutive
reasoning, text and calls of the assistant are one message. The items of an answer are reasoning, a
message, a call; the first two have one part, with the text. All events are numbered.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping

from specdec.requests.chat_format import arguments_object
from specdec.serve.http.agents.event_answer import Counts, Kind, Script
from specdec.serve.http.agents.events import Arguments, Content, Reasoning
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
from specdec.serve.http.answers import new_call_id
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
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
ECHOED: Json = {  # fields of a request, and what they are without one
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
NOT_DONE: Json = {"store": False, "service_tier": "default", "truncation": "disabled"}
# of each kind of item: the prefix of its id, its text's name in events, and how it begins
KINDS: dict[Kind, tuple[str, str, Json]] = {
    Content: ("msg", "output_text", {"type": "message", "role": "assistant"}),
    Reasoning: ("rs", "reasoning_text", {"type": "reasoning", "summary": []}),
    Arguments: ("fc", "function_call_arguments", {"type": "function_call"}),
}


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


class ResponsesScript(Script):
    """Writes a response. body: of the request. sampling: temperature and top_p, as they were."""

    def __init__(self, body: Mapping[str, object], model: str, sampling: Json) -> None:
        given = {name: body[name] for name in ECHOED if body.get(name) is not None}
        response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            **{**ECHOED, **given, **NOT_DONE},
            **sampling,
            "usage": None,
        }
        super().__init__(response, "output")
        self._count = 0

    def begin(self, counts: Counts) -> Iterator[Json]:
        yield self._event("created", response=dict(self.answer))
        yield self._event("in_progress", response=dict(self.answer))

    def begin_item(self, kind: Kind, name: str) -> Iterator[Json]:
        prefix, _, head = KINDS[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", **head}
        if kind is Arguments:
            item |= {"call_id": new_call_id(), "name": name, "arguments": ""}
        item["status"] = IN_PROGRESS
        if kind is not Arguments:
            item["content"] = []
        self.items.append(item)
        yield self._event("output_item.added", **self._index(), item=dict(item))
        if kind is not Arguments:
            yield self._event("content_part.added", **self._place(kind), part=_part(kind, ""))

    def delta(self, kind: Kind, text: str) -> Json:
        return self._text_event(kind, "delta", delta=text)

    def end_item(self, kind: Kind, status: str = COMPLETED) -> Iterator[Json]:
        item = self.items[-1]
        field = "arguments" if kind is Arguments else "text"
        yield self._text_event(kind, "done", **{field: self.text})
        if kind is Arguments:
            item["arguments"] = self.text
        else:
            part = _part(kind, self.text)
            item["content"] = [part]
            yield self._event("content_part.done", **self._place(kind), part=part)
        item["status"] = status
        yield self._event("output_item.done", **self._index(), item=dict(item))

    def end(self, reason: str, stop: str | int | None, counts: Counts) -> Iterator[Json]:
        """The response is completed, or cut by its limit. It has an item in any case."""
        if not self.items:
            yield from self.begin_next(Content)
        is_cut = reason == "length"
        status = INCOMPLETE if is_cut else COMPLETED
        if self.kind is not None:
            yield from self.end_item(self.kind, status)
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.answer |= {"status": status, "incomplete_details": details, "usage": _usage(counts)}
        if not is_cut:
            self.answer["completed_at"] = int(time.time())
        yield self._event(status, response=self.whole())

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The response has failed; what was done of it stays."""
        reason = {"code": "server_error", "message": error.message}
        self.answer |= {"status": "failed", "error": reason}
        yield self._event("failed", response=self.whole())

    def _index(self) -> Json:
        return {"output_index": len(self.items) - 1}

    def _place(self, kind: Kind) -> Json:
        place: Json = {"item_id": self.items[-1]["id"], **self._index()}
        return place if kind is Arguments else {**place, "content_index": 0}

    def _text_event(self, kind: Kind, what: str, **text: object) -> Json:
        logprobs: Json = {"logprobs": []} if kind is Content else {}
        return self._event(f"{KINDS[kind][1]}.{what}", **self._place(kind), **text, **logprobs)

    def _event(self, name: str, **fields: object) -> Json:
        self._count += 1
        return {"type": f"response.{name}", "sequence_number": self._count - 1, **fields}


def _part(kind: Kind, text: str) -> Json:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.num_prompt,
        "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
        "output_tokens": counts.num_output,
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
        "total_tokens": counts.num_prompt + counts.num_output,
    }
