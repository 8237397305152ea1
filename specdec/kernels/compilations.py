"""Kernels compiled ahead of serving, in parallel; those that requests wait for are counted.

`compiling_ahead` turns launches of the calling thread into requests to compile: nothing runs, and
all kernels are ready when the body has ended.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any

import torch

from specdec.kernels import (
    HAS_TRITON,
    AsyncCompileMode,
    active_mode,
    before_compiling,
    kernel_cache,
    triton,
)
from specdec.kernels.compiler_processes import CompilerProcesses
from weights.bars import bar

logger = logging.getLogger("specdec")

MOST_AT_ONCE = 32  # kernels; an engine needs a few hundred, and each process takes memory
BAR_DELAY = 0.5  # seconds: what takes less shows no bar
LAUNCHER = "__triton_launcher"  # the module's name of each of Triton's launchers

_is_expected: ContextVar[bool] = ContextVar("_is_expected", default=False)  # of this thread


@cache
def hashing_compiler() -> Thread:
    """Start a thread that hashes Triton's files, for its cache's keys: half a second of a start.

    It holds the interpreter's lock seldom, so it may run beside other work.
    """
    thread = Thread(target=kernel_cache.triton_key, daemon=True)
    thread.start()
    return thread


@contextmanager
def compiling_ahead(
    device: torch.device, progress: bool = True, may_fail: bool = False
) -> Iterator[Callable[[], None]]:
    """Only compile what the body launches. The memory that its kernels would write stays as it was.

    The body may call the yielded function from time to time: launches of a kernel that is ready by
    then are quick, others ask for it again at four times the cost.
    progress: show a bar, if it takes long enough to be seen
    may_fail: a kernel that does not compile or fit raises where it is launched later, not here
    """
    hashing_compiler().join()
    count = min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)

    def begin() -> None:
        """Start a thread that waits for the processes, and loads what these have compiled."""
        _use(device)
        before_compiling.set(processes.prepare)

    def note_ready() -> None:
        """Enter finished kernels in Triton's table, which it does only at the end by itself."""
        for kernel in list(mode.future_kernels.values()):
            if kernel.kernel is None and kernel.future.done():
                kernel.result(ignore_errors=may_fail)

    with (
        CompilerProcesses(count) as processes,
        ThreadPoolExecutor(count, initializer=begin) as pool,
    ):
        with _mode(pool, may_fail) as mode:
            try:
                yield note_ready
                _watch(mode.raw_futures, progress)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                mode.raw_futures.clear()  # it would wait for kernels that never begin
                raise
        # a kernel that did not compile, and may, is None
        first, others = by_launcher(filter(None, (f.kernel for f in mode.future_kernels.values())))
        if LAUNCHER in sys.modules:  # not the first in this process
            first, others = [], first + others
        # what a first launch would do: bring a kernel to the GPU and build its launcher
        for each in [pool.submit(getattr, kernel, "run") for kernel in first]:
            if each.exception() is not None and not may_fail:
                each.result()
        for kernel in others:
            with suppress(Exception) if may_fail else nullcontext():
                _ = kernel.run


@contextmanager
def _mode(pool: ThreadPoolExecutor, may_fail: bool) -> Iterator[AsyncCompileMode]:
    """Enter Triton's own mode, which an error would leave in force for all later launches here."""
    try:
        with AsyncCompileMode(pool, ignore_errors=may_fail) as mode:
            yield mode
    finally:
        active_mode.set(None)


def _watch(kernels: Sequence[Future[Any]], progress: bool) -> None:
    """Wait for all kernels. Reading from Triton's cache takes less than the delay of the bar."""
    done = as_completed(kernels)
    options = {"desc": "compiling kernels", "unit": "kernel", "delay": BAR_DELAY}
    for _ in bar(done, total=len(kernels), is_wanted=progress, **options):
        pass


def _use(device: torch.device) -> None:
    torch.cuda.set_device(device.index or 0)


def by_launcher(kernels: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Split kernels into the first of each launcher, and the others.

    Kernels with parameters of the same types in C have one launcher: there a pointer is a pointer,
    whatever it points to. Each launcher is a module of one name, and Python loads such a module
    twice into the module that was loaded last, whichever launcher that is: at that moment a thread
    that reads it gets another kernel's. So only first loads may run at the same time.
    """
    first: dict[tuple[str, ...], Any] = {}
    others = []
    for kernel in kernels:
        types = tuple(map(_type_in_c, kernel.src.signature.values()))
        if first.setdefault(types, kernel) is not kernel:
            others.append(kernel)
    return list(first.values()), others


def _type_in_c(parameter: object) -> str:
    """Name a parameter's type in Triton, with one name for all that a launcher takes alike."""
    name = re.sub(r"\*\w+", "*", str(parameter)).partition("<")[0]
    return re.sub(r"\b([iu])1\b", r"\g<1>8", name).replace("fp32", "f32")


@contextmanager
def compiling_is_expected() -> Iterator[None]:
    """In the body compilations are not logged: an engine starts."""
    token = _is_expected.set(True)
    try:
        yield
    finally:
        _is_expected.reset(token)


@dataclass(slots=True)
class Compilations:
    """Counts compilations outside `compiling_is_expected`; Triton calls it after each."""

    unexpected: Counter[str] = field(default_factory=Counter)  # by kernel
    is_quiet: bool = False

    def __call__(self, *, fn: Any, **_: object) -> None:
        if not _is_expected.get():
            name = fn.name.rpartition(".")[2]
            self.unexpected[name] += 1
            level = logging.DEBUG if self.is_quiet else logging.WARNING
            logger.log(level, "kernel %s was compiled while requests wait", name)


def compilations() -> Compilations:
    """Return this process's compilations while requests waited, since its first start on a GPU."""
    hook = triton.knobs.runtime.jit_post_compile_hook if HAS_TRITON else None
    return hook if isinstance(hook, Compilations) else Compilations()


def log_compilations(is_quiet: bool = False) -> None:
    """From here on count and log each kernel that is compiled outside `compiling_is_expected`.

    is_quiet: a warm-up compiles some; they are counted
    """
    triton.knobs.runtime.jit_post_compile_hook = hook = compilations()
    hook.is_quiet = is_quiet
