"""A kernel that is compiled while requests wait is named in the log; at a start it is not."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime._async_compile import active_mode

from specdec.kernels import compilations
from specdec.kernels.compilations import _log, compiling_ahead, compiling_is_expected


def test_only_compilations_outside_a_start_are_logged(caplog):
    kernel = SimpleNamespace(name="specdec.kernels.add._add_kernel")
    with compiling_is_expected():
        _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == []
    _log(fn=kernel, key="", already_compiled=False)
    assert caplog.messages == ["kernel _add_kernel was compiled while requests wait"]


@pytest.mark.parametrize("may_fail", [False, True])
def test_a_kernel_that_does_not_compile_ends_it_unless_it_may_fail(monkeypatch, may_fail):
    if torch.cuda.is_available():
        pytest.skip("kernels of ours, which are on no GPU")
    monkeypatch.setattr(compilations, "_use", lambda device: None)

    def compile_both() -> list[object]:
        finished: list[object] = []
        with compiling_ahead(torch.device("cpu"), may_fail=may_fail):
            mode = active_mode.get()
            mode.submit("bad", lambda: 1 // 0, finished.append)
            mode.submit("good", lambda: SimpleNamespace(run=None), finished.append)
        return finished

    try:
        if may_fail:
            assert len(compile_both()) == 1
        else:
            with pytest.raises(ZeroDivisionError):
                compile_both()
    finally:
        active_mode.set(None)  # an error leaves it
