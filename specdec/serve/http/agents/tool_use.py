"""The tools of a request, which of them an answer may or must call, and their results.

The fields are OpenAI's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.arguments import check_bool

NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
MAX_TOOLS = 512
FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
CHOICES = ("none", "auto", "required")
WANTED = '{"type": "function", "function": {"name": ..., "parameters": a JSON schema}}'
Schema = Mapping[str, object]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """Describes a tool that an answer may call. parameters: the JSON schema of an object."""

    name: str
    parameters: Schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Says what an answer does with tools. tools: all that the request has.

    choice: none, auto or required; named: the one that must be called. most: calls, if limited.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str | None = None
    most: int | None = None

    @property
    def possible(self) -> tuple[Tool, ...]:
        if self.choice == "none":
            return ()
        return tuple(each for each in self.tools if self.named in (None, each.name))

    def place(self, tool: Tool) -> str:
        """Name the parameters of a tool as a part of the request."""
        return f"tools[{self.tools.index(tool)}]: parameters of {tool.name!r}"


def tool_use(body: Mapping[str, object]) -> ToolUse:
    """Read the fields tools, tool_choice and parallel_tool_calls; ValueError names a wrong one."""
    tools = _tools(body.get("tools"))
    choice, named = _choice(body.get("tool_choice"), tools)
    is_parallel = body.get("parallel_tool_calls", True)
    check_bool("parallel_tool_calls", is_parallel)
    return ToolUse(tools, choice, named, None if is_parallel and named is None else 1)


def with_parameters(tools: object) -> object:
    """Give tools that have passed `tool_use` the parameters that templates expect of each."""
    assert isinstance(tools, list)
    return [
        each
        if each["function"].get("parameters") is not None
        else {**each, "function": {**each["function"], "parameters": NO_PARAMETERS}}
        for each in tools
    ]


def with_names(messages: object) -> object:
    """Give each result of a tool the name of its call, which some templates want.

    OpenAI's messages tie a result to its call by an id. What is no message is left alone.
    """
    if not isinstance(messages, list):
        return messages
    names: dict[str, str] = {}
    found = []
    for message in messages:
        if isinstance(message, dict):
            names |= _call_names(message)
            name = names.get(str(message.get("tool_call_id")))
            if message.get("role") == "tool" and message.get("name") is None and name is not None:
                message = {**message, "name": name}
        found.append(message)
    return found


def _call_names(message: Mapping[str, object]) -> dict[str, str]:
    calls = message.get("tool_calls")
    found = {}
    for call in calls if isinstance(calls, list) else ():
        name = _part(_part(call, "function"), "name")
        if isinstance(name, str) and isinstance(call.get("id"), str):
            found[call["id"]] = name
    return found


def _part(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _tools(given: object) -> tuple[Tool, ...]:
    if not isinstance(given, list | None):
        raise ValueError(f"tools={given!r:.200}: give a list of at most {MAX_TOOLS} tools")
    if len(given or ()) > MAX_TOOLS:
        raise ValueError(f"tools: {len(given or ())} given, give at most {MAX_TOOLS} tools")
    return tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(given or ()))


def _tool(given: object, place: str) -> Tool:
    kind, function = _part(given, "type"), _part(given, "function")
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"{place}: type {kind!r:.100} given, only function is supported")
    if kind is None or not isinstance(function, dict) or set(given) != {"type", "function"}:  # type: ignore[call-overload]
        raise ValueError(f"{place} is {given!r:.200}: give {WANTED}")
    unknown = sorted(set(function) - FUNCTION_KEYS)
    if unknown:
        known = ", ".join(sorted(FUNCTION_KEYS))
        raise ValueError(f"{place}.function: unknown {unknown[0]!r:.100}; known are {known}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        wanted = "1 to 128 letters, digits, _, ., : or -"
        raise ValueError(f"{place}.function.name={name!r:.200}: give {wanted}")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{place}.function.description of {name!r}: give text")
    parameters = function.get("parameters")
    if parameters is None:  # it takes none
        return Tool(name, {**NO_PARAMETERS, "additionalProperties": False})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        wanted = "give the JSON schema of an object"
        raise ValueError(f"{place} {name!r}: parameters={parameters!r:.200}: {wanted}")
    return Tool(name, {"type": "object", **parameters})


def _choice(given: object, tools: Sequence[Tool]) -> tuple[str, str | None]:
    """Return the choice, and the tool that it names."""
    if given is None:
        return ("auto" if tools else "none"), None
    if isinstance(given, str) and given in CHOICES:
        if given == "required" and not tools:
            raise ValueError("tool_choice='required' without tools: give tools too")
        return (given if tools else "none"), None
    name = _part(_part(given, "function"), "name")
    if _part(given, "type") != "function" or not isinstance(name, str):
        wanted = f'{", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise ValueError(f"tool_choice={given!r:.200}: give {wanted}")
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise ValueError(f"tool_choice: no tool is named {name!r:.100}; there are {known:.300}")
    return "required", name
