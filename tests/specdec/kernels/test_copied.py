"""Rows of x at the places of their pairs: kernel == twin, and no row where no pair is."""

import pytest
import torch

from specdec.kernels.experts.copied import copy_rows, copy_rows_ref
from specdec.kernels.experts.group import group_ref
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.expert_cases import choices

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["drawn", "padded", "nobody"])
@pytest.mark.parametrize("T, k, D", [(1, 1, 8), (17, 3, 40), (65, 2, 33)])
def test_the_kernel_copies_as_the_twin_does(device, how, T, k, D):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    torch.manual_seed(0)
    ids = choices(T, 12, k, device, how)
    x = torch.randn(T, 2 * D, device=device)[:, :D]
    pairs, _, places, _ = group_ref(ids, 12, 16)
    found, expected = by_kernel(copy_rows)(x, places), copy_rows_ref(x, places)
    count = int((ids < 12).sum())
    assert torch.equal(expected[:count], x[pairs[:count].long() // k])
    assert torch.equal(found[:count], expected[:count])
