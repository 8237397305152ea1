"""A kernel that is compiled while requests wait is named in the log; at a start it is not."""

from types import SimpleNamespace

from specdec.kernels.compilations import _log, compiling_is_expected


def test_only_compilations_outside_a_start_are_logged(caplog):
    kernel = SimpleNamespace(name="specdec.kernels.add._add_kernel")
    with compiling_is_expected():
        _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == []
    _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == ["kernel _add_kernel was compiled while requests wait"]
