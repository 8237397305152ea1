"""Devices on which bits may be compared: a row of a product depends on nothing but the row."""

import pytest
import torch

from specdec.kernels import tl, triton
from specdec.kernels.attention import combine, parts
from tests.specdec.kernels.row_products import multiply_row_by_row


@pytest.fixture
def exact_interpreter(monkeypatch):
    torch.manual_seed(0)
    multiply_row_by_row(monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def exact_device(request):
    torch.manual_seed(0)
    if request.param == "cpu":
        request.getfixturevalue("exact_interpreter")
    return request.param


@triton.jit
def _forget(at, inside):
    """What `drop_lines` may do, for lines of 8 columns."""
    tl.store(at[:, None] + tl.arange(0, 8)[None, :], float("nan"), mask=inside[:, None])


@pytest.fixture
def forget(exact_interpreter, monkeypatch):
    """forget(): from now on what was added up is NaN."""

    def begin():
        monkeypatch.setattr(combine, "line_columns", lambda *_: 8)
        monkeypatch.setattr(parts, "drop_lines", _forget)

    return begin
