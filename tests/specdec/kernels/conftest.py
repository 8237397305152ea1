"""Devices on which bits may be compared: a row of a product depends on nothing but the row."""

import pytest
import torch

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
