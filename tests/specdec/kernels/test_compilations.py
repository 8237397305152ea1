"""A bar while kernels are compiled ahead; a later compilation is named in the log."""

import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from specdec.kernels import compilations
from specdec.kernels.compilations import _log, _watch, compiling_is_expected


@pytest.mark.parametrize(
    "is_terminal, progress, delay, is_shown",
    [
        (True, True, 0.0, True),
        (True, True, 60.0, False),  # as where all kernels are in Triton's cache
        (True, False, 0.0, False),
        (False, True, 0.0, False),
    ],
)
def test_a_bar_counts_kernels_where_it_is_seen_and_takes_long(
    monkeypatch, capsys, is_terminal, progress, delay, is_shown
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(compilations, "BAR_DELAY", delay)
    kernels = [Future(), Future()]
    kernels[0].set_result("a kernel")
    kernels[1].set_exception(ValueError("of the compiler, which the caller meets later"))
    _watch(kernels, progress)
    shown = capsys.readouterr().err
    assert ("compiling kernels" in shown, "2/2" in shown) == (is_shown, is_shown)


def test_only_compilations_outside_a_start_are_logged(caplog):
    kernel = SimpleNamespace(name="specdec.kernels.add._add_kernel")
    with compiling_is_expected():
        _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == []
    _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == ["kernel _add_kernel was compiled while requests wait"]
