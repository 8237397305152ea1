"""How the answers of one request are read: as reasoning, content and calls; and their grammar.

Reasoning is what an answer begins with, in <think> and </think>. White space around it is dropped.
Which syntax calls have says the operator, by vLLM's names, or the chat template.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from specdec.requests.json_schemas import SchemaError
from specdec.serve.http.agents.events import (
    Arguments,
    Call,
    Content,
    Event,
    Reading,
    Reasoning,
    Source,
    is_markup,
    merged,
    read_content,
)
from specdec.serve.http.agents.grammar import Lark
from specdec.serve.http.agents.json_calls import (
    CLOSE,
    OPEN,
    hermes_call,
    llama3_json_call,
    read_hermes,
    read_llama3_json,
)
from specdec.serve.http.agents.tool_use import Schema, Tool, ToolUse
from specdec.serve.http.agents.xml_calls import qwen3_xml_call, read_qwen3_xml

THINK, END_THINK = "<think>", "</think>"
SPACE = r"/[ \n]{0,4}/"  # after the reasoning
NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Says how a family of models writes calls.

    read: content and calls of an answer; call: the grammar of one call; separator: between calls.
    tags: around a call; they may be special tokens, which must then be written out. Without them a
    grammar cannot tell at its first token whether it is a call or JSON. signs: a pattern of what a
    chat template of such models has.
    """

    name: str
    read: Callable[[Mapping[str, Tool], Source], Reading[None]]
    call: Callable[[Lark, Tool], str]
    separator: str
    tags: tuple[str, ...]
    signs: str


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


@dataclass(slots=True)
class WholeCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    @staticmethod
    def of(events: Iterable[Event]) -> "Message":
        message = Message()
        for event in events:
            match event:
                case Content(text):
                    message.content += text
                case Reasoning(text):
                    message.reasoning += text
                case Call(_, name):
                    message.calls.append(WholeCall(name))
                case Arguments(index, text):
                    message.calls[index].arguments += text
        return message


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """calls: None if no calls are read. is_open: the prompt has begun the reasoning."""

    calls: CallFormat | None = None
    use: ToolUse = NO_TOOLS
    thinks: bool = False
    is_open: bool = False

    @property
    def is_plain(self) -> bool:
        return self.calls is None and not self.thinks

    def reader(self) -> "MessageReader":
        sources = [Source(partial(_read_reasoning, self.is_open))] if self.thinks else []
        if self.calls is not None:
            tools = {tool.name: tool for tool in self.use.tools}
            sources.append(Source(partial(self.calls.read, tools)))
        return MessageReader(sources, self.use.most)

    def message(self, text: str, is_cut: bool = False) -> Message:
        """Read a whole answer. is_cut: by max_tokens."""
        reader = self.reader()
        return Message.of([*reader.push(text), *reader.finish(is_cut)])


class MessageReader:
    """Reads by several sources, each of the content that the one before it leaves.

    most: calls that are passed on; None for all.
    """

    def __init__(self, sources: Sequence[Source], most: int | None) -> None:
        self._sources = sources
        self._most = most
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Return what more text means, as far as that is certain."""
        return self._read([Content(text)] if text else [], lambda source: ())

    def finish(self, is_cut: bool = False) -> list[Event]:
        """Return the rest, when the text is over. is_cut: by max_tokens, perhaps within markup."""
        return self._read([], lambda source: source.finish(is_cut))

    def _read(self, events: list[Event], rest: Callable[[Source], Iterable[Event]]) -> list[Event]:
        for source in self._sources:
            found: list[Event] = []
            for event in events:
                found += source.push(event.text) if isinstance(event, Content) else [event]
            events = [*found, *rest(source)]
        kept = [event for event in events if self._is_kept(event)]
        self.num_calls += sum(isinstance(event, Call) for event in kept)
        return merged(kept)

    def _is_kept(self, event: Event) -> bool:
        if self._most is None or isinstance(event, Content | Reasoning):
            return True
        return event.index < self._most


def _read_reasoning(is_open: bool, source: Source) -> Reading[None]:
    """Read reasoning, which without a closing tag is all, and content, whatever tags it has."""
    source.hold()
    yield from source.skip()
    has_tag = yield from source.accept(THINK)
    if has_tag or is_open:
        source.release()
        yield from source.skip()
        if (yield from read_content(source, (END_THINK,), kind=Reasoning)) is not None:
            source.release()
        yield from source.skip()
    else:
        source.go_back()
        if source.is_cut and is_markup(source.text[source.at :], (THINK,)):
            return
    while True:
        text, source.at = source.text[source.at :], len(source.text)
        if text:
            yield Content(text)
        if source.is_over:
            return
        yield None


def answer_grammar(special: Collection[str], reading: AnswerReading, schema: Schema | None) -> str:
    """Write the grammar of the calls that a request allows, and of an answer by `schema`, if any.

    The answer may be left out only where calls are a must. ValueError names a tool whose parameters
    have no grammar. special: the tokenizer's special tokens.
    """
    lark = Lark(special)
    forms = [] if reading.calls is None else [_calls(lark, reading.calls, reading.use)]
    if schema is not None and reading.use.choice != "required":
        forms.append(lark.json(schema))
    start = lark.rule(" | ".join(forms))
    if reading.thinks:
        start = f"{_reasoning(lark, reading.is_open)} {start}"
    return lark.grammar(start)


def _calls(lark: Lark, calls: CallFormat, use: ToolUse) -> str:
    rules = []
    for tool in use.possible:
        try:
            rules.append(lark.rule(calls.call(lark, tool)))
        except SchemaError as error:
            raise ValueError(f"{use.place(tool)}: {error}") from error
    call = lark.rule(" | ".join(rules))
    return call if use.most == 1 else f"{call} ({lark.text(calls.separator)} {call})*"


def _reasoning(lark: Lark, is_open: bool) -> str:
    """Allow reasoning: it must be closed if the prompt has opened it, else it may be left out."""
    closed = f"{lark.until(END_THINK)} {lark.rule(SPACE)}"
    return closed if is_open else f"{lark.rule(f'{lark.tag(THINK)} {closed}')}?"
