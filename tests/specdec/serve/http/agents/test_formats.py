"""Which syntax is read: by the marks in chat templates of each family, or as an operator says."""

import pytest

from specdec.serve.http.agents.answer_reading import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    answer_format,
)
from tests.specdec.requests.chat_families import FAMILIES

# the parts of each family's template that show what the model writes
TEMPLATES = {
    "hermes": '{%- if tools %}... <tool_call>\\n{"name": <function-name>, "arguments": <args>}',
    "qwen3_xml": "{% if tools %}<tool_call>\\n<function=example>\\n<parameter=one>{% endif %}",
    "llama3_json": 'tools ... {"name": function name, "parameters": dictionary of arguments}',
    None: '{{ messages[0].content }}[TOOL_CALLS]{"name": {{ x }}, "parameters": {{ y }}}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_how_calls_are_written(name):
    found = answer_format(TEMPLATES[name], "auto", "auto")
    assert (found.calls and found.calls.name) == name
    assert found.knows_tools == (name is not None)
    assert not found.thinks


def test_calls_in_channels_are_not_read():
    """gpt-oss's template knows tools, so a request with some is refused by name."""
    found = answer_format(FAMILIES["harmony"].template, "auto", "auto")
    assert found.knows_tools
    assert found.calls is None
    assert not found.thinks


def test_the_template_says_whether_the_model_reasons():
    template = "{% set content = content.split('</think>')[-1] %}"
    assert answer_format(template, "auto", "auto").thinks
    assert not answer_format(template, "auto", "none").thinks


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_an_operator_says_how_calls_are_written(name):
    found = answer_format(TEMPLATES["hermes"], name, "none").calls
    wanted = {"auto": "hermes", "none": None, "qwen3_coder": "qwen3_xml"}
    assert (found and found.name) == wanted.get(name, name)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_an_operator_says_whether_the_model_reasons(name):
    assert answer_format("", "none", name).thinks == (name not in ("auto", "none"))
