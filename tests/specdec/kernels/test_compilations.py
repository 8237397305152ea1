"""A bar while kernels are compiled ahead; a later compilation is named in the log."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from triton import JITFunction
from triton.runtime._async_compile import active_mode

from specdec.kernels import compilations
from specdec.kernels.attention import walk
from specdec.kernels.compilations import (
    _watch,
    by_launcher,
    compiling_ahead,
    compiling_is_expected,
)


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


def kernel(*types: str) -> SimpleNamespace:
    """With parameters of these types."""
    return SimpleNamespace(src=SimpleNamespace(signature=dict(enumerate(types))), run=None)


def test_only_the_first_of_each_launcher_is_loaded_beside_others():
    kernels = [
        kernel("*bf16", "tensordesc<bf16[64, 64]>", "constexpr"),
        kernel("*bf16", "tensordesc<bf16[128, 64]>", "constexpr"),  # tiles are not in the types
        kernel("*fp32", "tensordesc<bf16[64, 64]>", "constexpr"),  # a pointer is a pointer
        kernel("*bf16", "tensordesc<bf16[64, 64]>"),
        kernel("i32", "i8", ("*i64", "fp32")),
        kernel("i32", "i1", ("*bf16", "fp32")),
        kernel("i32", "i16", ("*bf16", "fp32")),
    ]
    first, others = by_launcher(kernels)
    assert first == [kernels[0], kernels[3], kernels[4], kernels[6]]
    assert others == [kernels[1], kernels[2], kernels[5]]


@pytest.fixture
def hook(monkeypatch):
    """What counts and logs the compilations of this process."""
    monkeypatch.setattr(compilations.triton.knobs.runtime, "jit_post_compile_hook", None)
    compilations.log_compilations()
    return compilations.triton.knobs.runtime.jit_post_compile_hook


def compiled(name: str) -> dict[str, object]:
    """What Triton says of a kernel."""
    fn = SimpleNamespace(name=f"specdec.kernels.file.{name}")
    return {"fn": fn, "compile": {}, "key": "", "already_compiled": False}


def test_only_compilations_outside_a_start_are_counted_and_logged(hook, caplog):
    with compiling_is_expected():
        hook(**compiled("_add_kernel"))
    assert (caplog.messages, hook.unexpected.total()) == ([], 0)
    hook(**compiled("_add_kernel"))
    assert caplog.messages == ["kernel _add_kernel was compiled while requests wait"]
    assert compilations.compilations().unexpected == {"_add_kernel": 1}


def test_a_second_start_keeps_the_counts(hook):
    hook(**compiled("_add_kernel"))
    compilations.log_compilations()
    assert compilations.compilations() is hook


def test_the_hook_understands_what_triton_calls_it_with(hook):
    function = JITFunction(walk._paged_attention_kernel.fn)
    options = dict.fromkeys(("num_ctas", "num_stages", "enable_fp_fusion", "extern_libs"))
    options |= {"num_warps": 2, "launch_cooperative_grid": False}
    given = {
        "key": ("", ()),
        "signature": {},
        "target": SimpleNamespace(),
        "device": 0,
        "constants": {},
        "options": SimpleNamespace(**options),
        "configs": [{}],
        "is_warmup": False,
    }
    wanted = inspect.signature(function._call_hook).parameters.keys() - {"hook"}
    function._call_hook(hook, **{name: given[name] for name in wanted})
    assert hook.unexpected == {"_paged_attention_kernel": 1}


@pytest.mark.parametrize("may_fail", [False, True])
def test_a_kernel_that_does_not_compile_ends_it_unless_it_may_fail(monkeypatch, may_fail):
    if torch.cuda.is_available():
        pytest.skip("kernels of ours, which are on no GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def compile_both() -> list[object]:
        finished: list[object] = []
        with compiling_ahead(torch.device("cpu"), may_fail=may_fail):
            mode = active_mode.get()
            mode.submit("bad", lambda: 1 // 0, finished.append)
            mode.submit("good", lambda: kernel("*bf16"), finished.append)
        return finished

    if may_fail:
        assert len(compile_both()) == 1
    else:
        with pytest.raises(ZeroDivisionError):
            compile_both()
    assert active_mode.get() is None  # else nothing would run any more


def test_an_error_ends_it_while_kernels_wait_for_their_turn(monkeypatch):
    """In a thread of its own: Triton waits for all that was asked for, even if it never begins."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    begun, found = [], []

    def fail() -> None:
        try:
            with compiling_ahead(torch.device("cpu")):
                mode = active_mode.get()
                for i in range(500):
                    mode.submit(i, lambda: (begun.append(1), time.sleep(0.02)), found.append)
                raise MemoryError("full")
        except MemoryError as error:
            found.append((error, error.__context__, active_mode.get()))

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    thread.join(timeout=30)
    [(error, context, mode)] = found
    assert (str(error), context, mode) == ("full", None, None)
    assert len(begun) < 500


def test_processes_compile_into_the_cache_and_tell_what_went_wrong(tmp_path):
    """In a process without the interpreter; their own ends are survived."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.specdec.kernels.compile_in_processes"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["before"], found["after"]) == ([False, False], [True, True])
    assert found["seconds here"] < 0.2
    assert "kernel _add_kernel, compiled in a process of its own: CompilationError" in done.stderr
    assert done.stderr.count("a process that compiles kernels has ended") == 2
    assert "has ended (FileNotFoundError: " in done.stderr
    assert (found["ended"], found["status"]) == (False, -signal.SIGKILL)
    assert not found["started for nothing"]
    assert found["elsewhere"] == [False, True]
    assert not found["in this thread"]


def test_processes_end_quietly_where_the_engine_is_killed_meanwhile():
    """Its ends of the pipes are closed before they answer."""
    ours, theirs = socket.socketpair()
    done = subprocess.Popen(
        [sys.executable, "-c", compilations.PROGRAM, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    pipe = Connection(ours.detach())
    pipe.send_bytes(b"no job")
    pipe.close()
    assert done.communicate(timeout=60)[1] == ""
    assert done.returncode == 0
