"""Products of the interpreter, made row by row.

By itself it multiplies with numpy, whose sums depend on a row's place in the tile. A GPU's do not:
its tensor cores add up 16 products at once, to what they have.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

AT_ONCE = 16


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product depends on nothing but the row and the other matrix."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    def create_dot(self, a, b, d, *_):
        a, b = (_numbers(each).astype(d.data.dtype) for each in (a, b))
        summed = d.data
        for k in range(0, a.shape[1], AT_ONCE):
            products = a[:, k : k + AT_ONCE, None] * b[None, k : k + AT_ONCE]
            summed = summed + np.add.reduce(products, axis=1)
        return TensorHandle(summed, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _numbers(handle: TensorHandle) -> np.ndarray:
    """Decode 8-bit floats, which the interpreter keeps as bytes."""
    if handle.dtype.scalar.name != "fp8e4nv":
        return handle.data
    return torch.from_numpy(handle.data.copy()).view(torch.float8_e4m3fn).float().numpy()
