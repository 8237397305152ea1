"""The kernel masks what its twin masks, and no other row."""

import numpy as np
import pytest
import torch

from specdec.kernels.mask_rows import mask_rows, mask_rows_ref
from tests.specdec.kernels.by_kernel import by_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


@pytest.mark.parametrize("num_ids", [1, 31, 64, 200, 2049])
@pytest.mark.parametrize("rows", [[0], [4, 1], [2, 0, 4, 3]])
def test_rows_lose_the_ids_whose_bit_is_zero(device, num_ids, rows):
    is_allowed = torch.rand(len(rows), num_ids) < 0.3
    packed = np.packbits(is_allowed.numpy(), axis=1, bitorder="little")
    padded = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    bits = torch.from_numpy(padded.view(np.int32).copy()).to(device)
    logits = torch.randn(5, num_ids + 7, device=device)[:, :num_ids]  # rows with a stride
    expected = logits.cpu().clone()
    expected[torch.tensor(rows)] += torch.where(is_allowed, 0.0, -torch.inf)

    for mask in (by_kernel(mask_rows), mask_rows_ref):
        found = torch.full((5, num_ids + 7), -999.0, device=device)
        found[:, :num_ids] = logits
        mask(found[:, :num_ids], torch.tensor(rows, device=device), bits)
        assert torch.equal(found[:, :num_ids].cpu(), expected)
        assert (found[:, num_ids:] == -999).all()


def test_nan_stays_nan_so_that_a_broken_row_is_seen(device):
    for mask in (by_kernel(mask_rows), mask_rows_ref):
        logits = torch.full((1, 40), torch.nan, device=device)
        bits = torch.zeros(1, 2, dtype=torch.int32, device=device)
        mask(logits, torch.zeros(1, dtype=torch.int64, device=device), bits)
        assert logits.isnan().all()
