"""Rows of which ranks have some columns each have the codes of whole rows."""

import pytest
import torch

from specdec.kernels.fp8.quantise import (
    launch_quantise,
    quantise,
    quantise_ref,
    row_peaks,
    row_peaks_ref,
)


def rows(device):
    torch.manual_seed(0)
    x_TK = torch.randn(7, 192, device=device)
    x_TK[1, 150] = 1e4
    x_TK[2] = 0
    x_TK[3] *= 1e-20
    x_TK[4, 5], x_TK[5, 6] = torch.nan, torch.inf
    return x_TK


def bits(rows):
    return rows.codes_TK.view(torch.uint8)


@pytest.mark.parametrize("border", [64, 128])
def test_columns_of_a_row_have_its_codes(exact_device, border):
    x_TK = rows(exact_device)
    whole = quantise_ref(x_TK, False)
    parts = x_TK[:, :border].contiguous(), x_TK[:, border:]  # the second has other rows between
    peaks_T = torch.maximum(*map(row_peaks, parts))
    assert torch.equal(peaks_T, row_peaks_ref(x_TK))
    found = [quantise(part, False, peaks_T) for part in parts]
    assert torch.equal(torch.cat([bits(part) for part in found], 1), bits(whole))
    assert all(torch.equal(part.scales, whole.scales) for part in found)
    alone = quantise(parts[0], False)
    assert not torch.equal(bits(alone)[1], bits(found[0])[1])


def test_the_kernel_has_the_codes_of_the_twin(exact_device):
    x_TK = rows(exact_device)
    peaks_T = 3.0 * row_peaks(x_TK)
    found, expected = (each(x_TK, False, peaks_T) for each in (launch_quantise, quantise_ref))
    assert torch.equal(bits(found), bits(expected))
    assert torch.equal(found.scales, expected.scales)
