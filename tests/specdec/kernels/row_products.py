"""Products of the interpreter, made row by row.

By itself it multiplies with numpy, whose sums depend on a row's place in the tile. A GPU's do not.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product depends on nothing but the row and the other matrix."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    def create_dot(self, a, b, d, *_):
        a, b = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        summed = np.add.reduce(a[:, :, None] * b[None], axis=1)
        return TensorHandle(summed + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
