"""Spares Triton's interpreter what it does without any effect: more than half of its time.

- Whenever a kernel calls a function it patches triton.language again; once a launch is enough.
- It computes whether integers overflow, but asserts it only with `debug`, which is off.
- It makes its table of dtypes again for every lookup.

The names are Triton's own, of 3.6 and 3.7.
"""

from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """For the life of this process."""
    _patch_once_a_launch()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_dtypes()


def _patch_once_a_launch() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # namespaces of functions that the running kernel has called

    def patch_first(fn: FunctionType) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(*args, **kwargs)

    interpreter._patch_lang = patch_first
    interpreter.GridExecutor.__call__ = launch_anew


def _keep_dtypes() -> None:
    dtype_of = interpreter._get_np_dtype
    of_scalar = cache(lambda name: dtype_of(tl.dtype(name)))

    def kept(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.scalar
        return dtype_of(scalar) if scalar.is_ptr() else of_scalar(scalar.name)

    interpreter._get_np_dtype = kept
