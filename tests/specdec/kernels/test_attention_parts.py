"""Stored partial results are added up in order, several at once, and absent ones change nothing."""

import pytest
import torch
from torch import Tensor

from specdec.kernels import tl, triton
from specdec.kernels.attention.combine import FEW_AT_ONCE, MANY_AT_ONCE
from specdec.kernels.attention.parts import add_parts

C = 16


@triton.jit
def _sum_kernel(
    out_ptr,  # [C + 2] values, peak, total
    acc_ptr,  # [N, C]
    stats_ptr,  # [N, 2]
    first,
    end,
    C: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    parts = acc_ptr, stats_ptr, 0
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((C,), tl.float32)
    peak, total, acc = add_parts(parts, first, end, peak, total, acc, C, AT_ONCE)
    tl.store(out_ptr + tl.arange(0, C), acc)
    tl.store(out_ptr + C, peak)
    tl.store(out_ptr + C + 1, total)


def added(values: Tensor, stats: Tensor, first: int, end: int, at_once: int) -> Tensor:
    """The bits of parts first .. end - 1 as one; those not asked for are NaN."""
    values, stats = values.clone(), stats.clone()
    for x in (values, stats):
        x[:first] = torch.nan
        x[end:] = torch.nan
    out = torch.full((C + 2,), torch.nan, device=values.device)
    _sum_kernel[(1,)](out, values, stats, first, end, C, at_once, num_warps=1)
    return out.view(torch.int32)


@pytest.mark.parametrize("at_once", [FEW_AT_ONCE, MANY_AT_ONCE])
@pytest.mark.parametrize("first, end", [(0, 1), (0, 7), (0, 8), (0, 9), (3, 17), (5, 5)])
def test_parts_are_added_in_order_however_many_at_once(exact_device, first, end, at_once):
    values = torch.randn(20, C, device=exact_device)
    stats = torch.randn(20, 2, device=exact_device).mul(5).abs()
    one_by_one = added(values, stats, first, end, 1)
    assert torch.equal(added(values, stats, first, end, at_once), one_by_one)


def test_an_absent_part_keeps_the_sign_of_zero(exact_device):
    values = torch.tensor([[-1e-38], [-0.0]], device=exact_device).repeat(1, C)
    stats = torch.tensor([[0.0, 1.0], [140.0, 1.0]], device=exact_device)
    found = added(values, stats, 0, 2, FEW_AT_ONCE).view(torch.float32)
    assert (found[:C] == 0).all()
    assert found[:C].signbit().all()
