"""Bars appear on a terminal and in a notebook, nowhere else, and only if they are wanted."""

import sys
from types import SimpleNamespace

import pytest

from specdec.llm import Progress
from weights.bars import bar, is_notebook


@pytest.fixture
def shell(monkeypatch):
    """shell(config): as if this process were an IPython shell with this config."""

    def start(config: dict[str, object]) -> None:
        module = SimpleNamespace(get_ipython=lambda: SimpleNamespace(config=config))
        monkeypatch.setitem(sys.modules, "IPython", module)

    return start


@pytest.mark.parametrize(
    "config, found", [({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False)]
)
def test_a_notebook_is_a_kernel_and_no_shell(shell, config, found):
    shell(config)
    assert is_notebook() == found


def test_ipython_that_is_only_imported_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not is_notebook()


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_kernel", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_bar_is_shown_where_it_is_seen(
    shell, monkeypatch, capsys, is_terminal, is_kernel, is_wanted
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    shell({"IPKernelApp": {}} if is_kernel else {})
    list(bar([1, 2], desc="reading", is_wanted=is_wanted))
    with Progress([], is_shown=is_wanted):
        pass

    err = capsys.readouterr().err
    assert [word in err for word in ("reading", "generating")] == [
        is_wanted and (is_terminal or is_kernel)
    ] * 2


def test_without_a_standard_error_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(bar([1, 2])) == [1, 2]
