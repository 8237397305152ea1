"""The grammar of a whole answer: reasoning, and then calls of tools or a value of a schema."""

from collections.abc import Collection

from specdec.requests.json_schemas import SchemaError
from specdec.serve.http.tools import thinking
from specdec.serve.http.tools.definitions import Schema, Tool
from specdec.serve.http.tools.grammar import Lark
from specdec.serve.http.tools.message_reader import AnswerReading

SPACE = r"/[ \n]{0,4}/"  # after the reasoning


def answer_grammar(special: Collection[str], reading: AnswerReading, schema: Schema | None) -> str:
    """Of the calls that a request allows, and of an answer by `schema` where calls are no must.

    special: the tokenizer's special tokens.
    """
    lark = Lark(special)
    forms = []
    if reading.calls is not None:
        forms.append(_calls(lark, reading))
    if schema is not None and reading.use.choice != "required":
        forms.append(lark.json(schema))
    start = lark.rule(" | ".join(forms))
    if reading.thinks:
        start = f"{_reasoning(lark, reading.is_open)} {start}"
    return lark.grammar(start)


def _calls(lark: Lark, reading: AnswerReading) -> str:
    assert reading.calls is not None
    call = lark.rule(" | ".join(_call(lark, reading, tool) for tool in reading.use.possible))
    if reading.use.most == 1:
        return call
    return f"{call} ({lark.text(reading.calls.separator)} {call})*"


def _call(lark: Lark, reading: AnswerReading, tool: Tool) -> str:
    assert reading.calls is not None
    try:
        return lark.rule(reading.calls.call(lark, tool))
    except SchemaError as error:
        place = f"tools[{reading.use.position(tool)}]: parameters of {tool.name!r}"
        raise ValueError(f"{place}: {error}") from error


def _reasoning(lark: Lark, is_open: bool) -> str:
    """It must be closed if the prompt has opened it, and may be left out otherwise."""
    closed = f"{lark.until(thinking.CLOSE)} {lark.rule(SPACE)}"
    if is_open:
        return closed
    return f"{lark.rule(f'{lark.tag(thinking.OPEN)} {closed}')}?"
