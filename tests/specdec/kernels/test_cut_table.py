"""Lookups in a table that is cut for several ranks have the bits of its rows."""

from itertools import pairwise

import pytest
import torch

from specdec.kernels.cut_table import own_rows, own_rows_ref, rows_of_all, rows_of_all_ref
from tests.specdec.kernels.by_kernel import by_kernel

BORDERS = (0, 40, 64, 97)


@pytest.mark.parametrize("T, D", [(1, 8), (3, 100), (17, 2056)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_found_on_the_rank_that_has_them(T, D, dtype):
    table_VD = torch.randn(97, D).to(dtype)
    table_VD[40], table_VD[96] = -0.0, torch.inf
    ids_T = torch.arange(T) * 7 % 97
    ids_T[0], ids_T[-1] = 40, 96
    parts = [(table_VD[a:b], a) for a, b in pairwise(BORDERS)]
    found = [by_kernel(own_rows)(ids_T, part, first) for part, first in parts]
    for own_TD, (part, first) in zip(found, parts, strict=True):
        assert torch.equal(own_TD, own_rows_ref(ids_T, part, first))
    rows_NTD = torch.stack(found)
    merged_TD = by_kernel(rows_of_all)(rows_NTD)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(merged_TD.view(bits), table_VD[ids_T].view(bits))
    assert torch.equal(merged_TD.view(bits), rows_of_all_ref(rows_NTD).view(bits))


def test_garbage_in_the_place_of_ids_finds_nothing():
    ids_T = torch.tensor([-1, 3, 1 << 40, -(1 << 40)])
    table_RD = torch.ones(3, 8)
    for look_up in (by_kernel(own_rows), own_rows_ref):
        assert look_up(ids_T, table_RD, 2)[:, 0].tolist() == [0, 1, 0, 0]
