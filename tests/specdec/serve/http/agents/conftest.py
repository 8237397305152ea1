"""A server whose model can be given tools, under the names that agents call models by."""

import pytest

from tests.specdec.serve.http.tool_templates import THINKING

NAMES = ("demo", "gpt-5.2-codex", "claude-opus-4-6")


@pytest.fixture(scope="package")
def thinker(serve):
    """It reasons unless it is told not to."""
    sizes = {"max_model_len": 2048}
    with serve(chat_template=THINKING, model_names=NAMES, sizes=sizes) as found:
        yield found


@pytest.fixture(scope="package")
def namer(serve):
    """Its template gives tools by their names alone: agents' own schemas exceed its context."""
    template = THINKING.replace("tool | tojson", "tool.function.name")
    with serve(chat_template=template, model_names=NAMES, sizes={"max_model_len": 2048}) as found:
        yield found
