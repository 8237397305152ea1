"""Kernels compiled ahead of serving, in parallel; one that requests must wait for is logged.

`compiling_ahead` turns launches of the calling thread into requests to compile: nothing runs, and
all kernels are ready when the body has ended.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from specdec.kernels import AsyncCompileMode, triton
from weights.bars import bar

logger = logging.getLogger("specdec")

BAR_DELAY = 0.5  # seconds: what takes less shows no bar

_is_expected: ContextVar[bool] = ContextVar("_is_expected", default=False)  # of this thread


@contextmanager
def compiling_ahead(device: torch.device, progress: bool = True) -> Iterator[None]:
    """Only compile what the body launches. What its kernels would have written stays as it was.

    progress: show a bar, if it takes long enough to be seen
    """
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads, initializer=partial(_use, device)) as pool:
        with AsyncCompileMode(pool) as mode:
            yield
            _watch(mode.raw_futures, progress)
        for _ in pool.map(_load, mode.future_kernels.values()):
            pass


def _watch(kernels: Sequence[Future[Any]], progress: bool) -> None:
    """Wait for all of them. Reading from Triton's cache takes less than the delay of the bar."""
    done = as_completed(kernels)
    options = {"desc": "compiling kernels", "unit": "kernel", "delay": BAR_DELAY}
    for _ in bar(done, total=len(kernels), is_wanted=progress, **options):
        pass


def _use(device: torch.device) -> None:
    torch.cuda.set_device(device.index or 0)


def _load(kernel: Any) -> object:
    """Bring it to the GPU and build its launcher, which its first launch would do."""
    return kernel.result().run


@contextmanager
def compiling_is_expected() -> Iterator[None]:
    """In the body compilations are not logged: an engine starts."""
    token = _is_expected.set(True)
    try:
        yield
    finally:
        _is_expected.reset(token)


def log_compilations() -> None:
    """From here on log each kernel that is compiled outside `compiling_is_expected`."""
    triton.knobs.runtime.jit_post_compile_hook = _log


def _log(*, fn: Any, **_: object) -> None:
    if not _is_expected.get():
        logger.warning("kernel %s was compiled while requests wait", fn.name.rpartition(".")[2])
