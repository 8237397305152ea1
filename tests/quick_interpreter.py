"""Spares Triton's interpreter what has no effect, more than half of its time, and orders its sums.

- Whenever a kernel calls a function it patches triton.language again; once a launch is enough.
- It computes whether integers overflow, but asserts it only with `debug`, which is off.
- It makes its table of dtypes again for every lookup.
- Its products are BLAS's, in which a row's bits depend on the CPU, the number of rows and the row's
  place. A GPU's do not, so here each sum is taken in order.

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
    interpreter.InterpreterBuilder.create_dot = _dot_in_order


def _dot_in_order(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """Multiply [..., M, K] by [..., K, N] and add d: each element sums over K on its own."""
    at_half = (
        interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
        if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating()
        else x.data
        for x in (a, b)
    )
    # contiguous, so that einsum's innermost loop is over N whatever the sizes
    a_MK, b_KN = (np.ascontiguousarray(x, dtype=d.data.dtype) for x in at_half)
    product_MN = np.einsum("...mk,...kn->...mn", a_MK, b_KN)
    return interpreter.TensorHandle(product_MN + d.data, d.dtype.scalar)


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
