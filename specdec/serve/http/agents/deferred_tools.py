"""Tools of /v1/messages that are shown to the model only once it has found them.

A tool with `defer_loading` is left out of the prompt until a tool's result refers to it by a block
of type tool_reference (the anthropic package: types/tool_param, types/tool_reference_block_param).
"""

from collections.abc import Iterator

from specdec.serve.http.agents.translation import Json, required_text, text_of, texts_of
from specdec.serve.http.errors import ApiError

REFERENCE = "tool_reference"
SERVER_SEARCH = "tool_search_tool"  # kinds of tools that would search on the server begin so
RESULT_PARTS = ("text", REFERENCE)


def result_texts(content: object, place: str) -> list[str]:
    """Texts of a tool's result. A reference reads as the name of its tool."""
    if not isinstance(content, list):
        return texts_of(content, place, RESULT_PARTS)
    return [_part_text(part, f"{place}[{i}]") for i, part in enumerate(content)]


def _part_text(part: object, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == REFERENCE:
        return required_text(part, "tool_name", place)
    return text_of(part, place, RESULT_PARTS)


def shown_tools(tools: list[Json], turns: object) -> list[Json]:
    """Those that the model may call now.

    All of them, if the search was to be done by the server: nothing else would find them here.
    """
    if any(str(tool.get("type")).startswith(SERVER_SEARCH) for tool in tools):
        return tools
    found = set(_references(turns))
    return [tool for i, tool in enumerate(tools) if not _waits(tool, i) or tool["name"] in found]


def _waits(tool: Json, i: int) -> bool:
    """Whether it has to be found first."""
    waits = tool.get("defer_loading", False)
    if not isinstance(waits, bool):
        raise ApiError(400, f"tools[{i}].defer_loading={waits!r:.200}: give true or false", "tools")
    if waits:
        required_text(tool, "name", f"tools[{i}]")
    return waits


def _references(turns: object) -> Iterator[object]:
    for turn in _objects(turns):
        for block in _objects(turn.get("content")):
            if block.get("type") == "tool_result":
                for part in _objects(block.get("content")):
                    if part.get("type") == REFERENCE:
                        yield part["tool_name"]


def _objects(items: object) -> list[Json]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
