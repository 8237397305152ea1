"""Results of tools in a conversation, as chat templates expect them.

OpenAI's messages tie a result to its call by an id; some templates want the name of the tool.
"""

from collections.abc import Iterator, Mapping


def with_names(messages: object) -> object:
    """Messages in which each result has the name of its call. What is no message is left alone."""
    if not isinstance(messages, list):
        return messages
    names: dict[str, str] = {}
    found = []
    for message in messages:
        if isinstance(message, dict):
            names.update(_calls(message))
            name = names.get(str(message.get("tool_call_id")))
            if message.get("role") == "tool" and message.get("name") is None and name is not None:
                message = {**message, "name": name}
        found.append(message)
    return found


def _calls(message: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Ids and names."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and isinstance(call.get("id"), str):
            yield call["id"], name
