"""Stored partial results are added up in order, several at once, and absent ones change nothing."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec.kernels import tl, triton
from specdec.kernels.attention.arguments import Parts
from specdec.kernels.attention.combine import FEW_AT_ONCE, MANY_AT_ONCE, line_columns
from specdec.kernels.attention.launch_plan import HeadShape
from specdec.kernels.attention.parts import add_parts, columns_of_lanes
from specdec.kernels.attention.splits import add_part, no_keys
from specdec.kernels.kept import LINE
from tests.specdec.kernels.attention_cases import load_part

C = 16


@triton.jit
def _sum_kernel(
    out_ptr,  # [C + 1] values, total
    acc_ptr,  # [N, C]
    stats_ptr,  # [N, 2]
    num_parts,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    LINE_COLUMNS: tl.constexpr = 0,
):
    parts = acc_ptr, stats_ptr, 0
    if FEW == 0:
        c = tl.arange(0, C)[None, :]
        peak, total, acc = no_keys(1, C)
        for i in range(num_parts):
            peak, total, acc = add_part(peak, total, acc, *load_part(parts, i, tl.arange(0, C), C))
        total = total[:, None]
    else:
        column = tl.program_id(0) * COLUMNS
        c = columns_of_lanes(column, COLUMNS)
        PART: tl.constexpr = (COLUMNS, C, LINE_COLUMNS)
        AT_ONCE: tl.constexpr = (FEW, MANY)
        total, acc = add_parts(parts, num_parts, column, None, PART, AT_ONCE, False)
    tl.store(out_ptr + c, acc, mask=c < C)
    tl.store(out_ptr + C + 0 * c, tl.broadcast_to(total, acc.shape))


def added(
    values: Tensor, stats: Tensor, num_parts: int, few: int, many: int = 1, columns: int = C
) -> Tensor:
    """The bits of the first parts as one; the others are NaN. few: 0, one after another."""
    values, stats = values.clone(), stats.clone()
    for x in (values, stats):
        x[num_parts:] = torch.nan
    out = torch.full((C + 1,), torch.nan, device=values.device)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    grid = (1 if few == 0 else -(-C // columns),)
    _sum_kernel[grid](out, values, stats, num_parts, C, columns, few, many, **options)
    return out.view(torch.int32)


@pytest.mark.parametrize("columns", [C, 8])
@pytest.mark.parametrize("few, many", [(2, 4), (4, 8), (FEW_AT_ONCE, MANY_AT_ONCE)])
@pytest.mark.parametrize("num_parts", [1, 2, 4, 5, 7, 8, 9, 16, 17, 33, 70])
def test_parts_are_added_in_order_however_many_at_once(exact_device, num_parts, few, many, columns):
    values = torch.randn(70, C, device=exact_device)
    stats = torch.randn(70, 2, device=exact_device).mul(5)
    stats[:, 1].abs_()
    one_by_one = added(values, stats, num_parts, 0)
    assert not one_by_one.view(torch.float32).isnan().any()
    assert torch.equal(added(values, stats, num_parts, few, many, columns), one_by_one)


def test_a_part_without_keys_is_added_as_one(exact_device):
    """Its peak is -inf and its total 0, before all others, among them and alone."""
    values = torch.randn(6, C, device=exact_device)
    stats = torch.rand(6, 2, device=exact_device)
    for i in (0, 1, 3):
        values[i], stats[i, 0], stats[i, 1] = 0, -torch.inf, 0
    for num_parts in range(1, 7):
        one_by_one = added(values, stats, num_parts, 0)
        for few, many in ((2, 4), (8, 16)):
            assert torch.equal(added(values, stats, num_parts, few, many), one_by_one)


@pytest.mark.parametrize("few, many", [(2, 4), (FEW_AT_ONCE, MANY_AT_ONCE)])
def test_an_absent_part_keeps_the_sign_of_zero(exact_device, few, many):
    values = torch.tensor([[-1e-38], [-0.0], [-0.0]], device=exact_device).repeat(1, C)
    stats = torch.tensor([[0.0, 1.0], [140.0, 1.0], [140.0, 1.0]], device=exact_device)
    found = added(values, stats, 3, few, many).view(torch.float32)
    assert (found[:C] == 0).all()
    assert found[:C].signbit().all()


@pytest.mark.parametrize("few, many", [(2, 4), (FEW_AT_ONCE, MANY_AT_ONCE)])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 8, 9, 16, 17, 33, 70])
@pytest.mark.parametrize("C, columns", [(16, 16), (16, 8), (24, 32)])
def test_what_was_added_is_forgotten_and_nothing_else(forget, num_parts, few, many, C, columns):
    values, stats = torch.randn(72, C), torch.rand(70, 2)
    expected, found, left = torch.empty(C + 1), torch.empty(C + 1), values.clone()
    grid = (-(-C // columns),)
    _sum_kernel[grid](expected, values, stats, num_parts, C, columns, few, many)
    forget()
    _sum_kernel[grid](found, left, stats, num_parts, C, columns, few, many, LINE_COLUMNS=8)
    assert torch.equal(found, expected)
    assert left[:num_parts].isnan().all()
    assert torch.equal(left[num_parts:], values[num_parts:])


@pytest.mark.parametrize("C, columns", [(128, 32), (64, 32), (96, 32), (80, 0), (16, 0)])
def test_only_whole_lines_are_forgotten(C, columns):
    acc = torch.zeros(4096)
    start = -acc.data_ptr() % LINE // 4
    for first, has_pdl in product((0, 1), (True, False)):
        given = SimpleNamespace(
            heads=HeadShape(4, 8, C, 2),
            parts=Parts(acc[start + first :], acc, 1, 0),
            constants={"PDL": has_pdl},
        )
        assert line_columns(given) == (columns if has_pdl and first == 0 else 0)
