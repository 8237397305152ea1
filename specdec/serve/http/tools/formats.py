"""Which syntax a model's calls and reasoning have: as an operator says, or by its chat template.

Names are vLLM's where it has one for the same syntax.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from specdec.serve.http.tools import hermes, llama3_json, qwen3_xml, thinking
from specdec.serve.http.tools.definitions import Tool
from specdec.serve.http.tools.grammar import (
    CallRule,
    hermes_call,
    llama3_json_call,
    qwen3_xml_call,
)
from specdec.serve.http.tools.source import Reader

AUTO, NONE, THINK = "auto", "none", "think"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """reader: of an answer; call: the grammar of one call; separator: between calls.

    looks_like_json: a grammar cannot tell at its first token whether it is a call or JSON.
    tags: texts that may be special tokens, which must then be written out. signs: what a chat
    template of such models has.
    """

    name: str
    reader: Callable[[Mapping[str, Tool]], Reader]
    call: CallRule
    separator: str
    tags: tuple[str, ...]
    signs: re.Pattern[str]
    looks_like_json: bool = False


CALL_FORMATS = (
    CallFormat(
        "qwen3_xml",
        qwen3_xml.Qwen3XmlReader,
        qwen3_xml_call,
        "\n",
        (hermes.OPEN, hermes.CLOSE),
        re.compile(r"<function=.*<parameter=", re.DOTALL),
    ),
    CallFormat(
        "hermes",
        lambda tools: hermes.HermesReader(),
        hermes_call,
        "\n",
        (hermes.OPEN, hermes.CLOSE),
        re.compile(hermes.OPEN),
    ),
    CallFormat(
        "llama3_json",
        llama3_json.Llama3JsonReader,
        llama3_json_call,
        "; ",
        (),
        re.compile(r'\{"name": [^{}]*"parameters": '),
        looks_like_json=True,
    ),
)
OTHER_NAMES = {"qwen3_coder": "qwen3_xml"}
REASONING_NAMES = (THINK, "deepseek_r1", "qwen3")
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
    """Of a chat template's text and two of the names above."""
    if tool_call_parser == AUTO:
        calls = next((each for each in CALL_FORMATS if each.signs.search(template)), None)
    else:
        name = OTHER_NAMES.get(tool_call_parser, tool_call_parser)
        calls = next((each for each in CALL_FORMATS if each.name == name), None)
    thinks = reasoning_parser in REASONING_NAMES
    if reasoning_parser == AUTO:
        thinks = thinking.CLOSE in template
    return AnswerFormat(calls, thinks, re.search(r"\btools\b", template) is not None)
