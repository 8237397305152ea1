"""Which syntax a model's calls and reasoning have: as an operator says, or by its chat template.

Names are vLLM's where it has one for the same syntax.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from specdec.serve.http.agents.answer_reading import END_THINK, CallFormat
from specdec.serve.http.agents.json_calls import (
    CLOSE,
    OPEN,
    hermes_call,
    llama3_json_call,
    read_hermes,
    read_llama3_json,
)
from specdec.serve.http.agents.xml_calls import qwen3_xml_call, read_qwen3_xml

AUTO, NONE = "auto", "none"
LLAMA3_SIGNS = r'\{"name": [^{}]*"parameters": '
TAGS = (OPEN, CLOSE)
CALL_FORMATS = (
    CallFormat("qwen3_xml", read_qwen3_xml, qwen3_xml_call, "\n", TAGS, "<function=.*<parameter="),
    CallFormat("hermes", read_hermes, hermes_call, "\n", TAGS, OPEN),
    CallFormat("llama3_json", read_llama3_json, llama3_json_call, "; ", (), LLAMA3_SIGNS),
)
OTHER_NAMES = {"qwen3_coder": "qwen3_xml"}
REASONING_NAMES = ("think", "deepseek_r1", "qwen3")
TOOL_CALL_PARSERS = (AUTO, *sorted([*OTHER_NAMES, *(each.name for each in CALL_FORMATS)]), NONE)
REASONING_PARSERS = (AUTO, *REASONING_NAMES, NONE)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """calls: None if unreadable. thinks: whether reasoning is read. knows_tools: the template."""

    calls: CallFormat | None
    thinks: bool
    knows_tools: bool


@lru_cache(maxsize=16)
def answer_format(template: str, tool_call_parser: str, reasoning_parser: str) -> AnswerFormat:
    """Choose a format by a chat template's text and two of the names above."""
    name = OTHER_NAMES.get(tool_call_parser, tool_call_parser)
    fitting = [
        each
        for each in CALL_FORMATS
        if (re.search(each.signs, template, re.DOTALL) if name == AUTO else each.name == name)
    ]
    thinks = reasoning_parser in REASONING_NAMES
    if reasoning_parser == AUTO:
        thinks = END_THINK in template
    knows_tools = re.search(r"\btools\b", template) is not None
    return AnswerFormat(fitting[0] if fitting else None, thinks, knows_tools)
