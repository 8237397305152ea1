"""Kernels compiled ahead of serving, in parallel; one that requests must wait for is logged.

`compiling_ahead` turns launches of the calling thread into requests to compile: nothing runs, and
all kernels are ready when the body has ended.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from specdec.kernels import AsyncCompileMode, triton

logger = logging.getLogger("specdec")

_is_expected: ContextVar[bool] = ContextVar("_is_expected", default=False)  # of this thread


@contextmanager
def compiling_ahead(device: torch.device, may_fail: bool = False) -> Iterator[None]:
    """Only compile what the body launches. What its kernels would have written stays as it was.

    may_fail: a kernel that does not compile or fit raises where it is launched later, not here.
    """
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads, initializer=partial(_use, device)) as pool:
        with AsyncCompileMode(pool, ignore_errors=may_fail) as mode:
            yield
        loading = [pool.submit(_load, kernel) for kernel in mode.future_kernels.values()]
        for each in loading:
            if each.exception() is not None and not may_fail:
                each.result()


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
