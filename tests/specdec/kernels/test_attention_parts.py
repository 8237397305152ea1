"""Stored partial results are added up in order, several at once, and absent ones change nothing."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec.kernels import tl, triton
from specdec.kernels.attention.combine import FEW_AT_ONCE, MANY_AT_ONCE, line_columns
from specdec.kernels.attention.parts import add_parts, head_columns_of
from specdec.kernels.attention.query_tiles import Heads
from specdec.kernels.attention.splits import add_part
from specdec.kernels.attention.workspace import Parts
from specdec.kernels.kept import LINE
from tests.specdec.kernels.attention_cases import load_part

C = 16


@triton.jit
def _sum_kernel(
    out_ptr,  # [HEADS, C + 1] values, total
    acc_ptr,  # [HEADS, NS, C]
    stats_ptr,  # [HEADS, NS, 2]
    num_parts,
    NS,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    LINE_COLUMNS: tl.constexpr = 0,
):
    column = tl.program_id(0) * COLUMNS
    parts = acc_ptr, stats_ptr, 0, NS
    total, acc = add_parts(
        parts, num_parts, column, HEADS, COLUMNS, C, FEW, MANY, LINE_COLUMNS, False
    )
    out = out_ptr + tl.arange(0, HEADS)[:, None, None] * (C + 1)
    c = head_columns_of(column, COLUMNS)
    tl.store(out + c, acc, mask=tl.broadcast_to(c < C, acc.shape))
    tl.store(out + C + 0 * c, tl.broadcast_to(total, acc.shape))


@triton.jit
def _one_by_one_kernel(
    out_ptr,  # [C + 1] values, total
    acc_ptr,  # [NS, C]
    stats_ptr,  # [NS, 2]
    num_parts,
    C: tl.constexpr,
):
    c = tl.arange(0, C)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((C,), tl.float32)
    for i in range(num_parts):
        part_peak, part_total, part_acc = load_part((acc_ptr, stats_ptr, 0), i, c, C)
        peak, total, acc = add_part(peak, total, acc, part_peak, part_total, part_acc)
    tl.store(out_ptr + c, acc)
    tl.store(out_ptr + C, total)


def added(
    values: Tensor,
    stats: Tensor,
    num_parts: int,
    few: int,
    many: int = 1,
    columns: int = C,
    heads: int = 1,
) -> Tensor:
    """The bits of the first parts of heads [heads, C + 1], as one each; the others are NaN.

    Of a head the parts are those of the one before, the first one last. few: 0, one after another
    """
    values = torch.stack([values.roll(i, 0) for i in range(heads)])
    stats = torch.stack([stats.roll(i, 0) for i in range(heads)])
    for x in (values, stats):
        x[:, num_parts:] = torch.nan
    out = torch.full((heads, C + 1), torch.nan, device=values.device)
    options = {"enable_fp_fusion": False}
    if few == 0:
        for i in range(heads):
            _one_by_one_kernel[(1,)](out[i], values[i], stats[i], num_parts, C, **options)
    else:
        grid = (-(-C // columns),)
        sizes = num_parts, values.shape[1], C, heads, columns, few, many
        _sum_kernel[grid](out, values, stats, *sizes, num_warps=heads, **options)
    return out.view(torch.int32)


@pytest.mark.parametrize("columns, heads", [(C, 1), (8, 1), (C, 4)])
@pytest.mark.parametrize("few, many", [(2, 4), (4, 8), (FEW_AT_ONCE, MANY_AT_ONCE)])
@pytest.mark.parametrize("num_parts", [1, 2, 4, 5, 7, 8, 9, 16, 17, 33, 70])
def test_parts_are_added_in_order_however_many_at_once(
    exact_device, num_parts, few, many, columns, heads
):
    values = torch.randn(70, C, device=exact_device)
    stats = torch.randn(70, 2, device=exact_device).mul(5)
    stats[:, 1].abs_()
    one_by_one = added(values, stats, num_parts, 0, heads=heads)
    assert not one_by_one.view(torch.float32).isnan().any()
    assert torch.equal(added(values, stats, num_parts, few, many, columns, heads), one_by_one)


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
    found = added(values, stats, 3, few, many).view(torch.float32)[0]
    assert (found[:C] == 0).all()
    assert found[:C].signbit().all()


@pytest.mark.parametrize("few, many", [(2, 4), (FEW_AT_ONCE, MANY_AT_ONCE)])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 8, 9, 16, 17, 33, 70])
@pytest.mark.parametrize("C, columns, heads", [(16, 16, 1), (16, 8, 1), (24, 32, 1), (16, 16, 4)])
def test_what_was_added_is_forgotten_and_nothing_else(
    forget, num_parts, few, many, C, columns, heads
):
    values, stats = torch.randn(heads, 72, C), torch.rand(heads, 72, 2)
    expected, found, left = torch.empty(heads, C + 1), torch.empty(heads, C + 1), values.clone()
    grid = (-(-C // columns),)
    sizes = num_parts, 72, C, heads, columns, few, many
    _sum_kernel[grid](expected, values, stats, *sizes)
    forget()
    _sum_kernel[grid](found, left, stats, *sizes, LINE_COLUMNS=8)
    assert torch.equal(found, expected)
    assert left[:, :num_parts].isnan().all()
    assert torch.equal(left[:, num_parts:], values[:, num_parts:])


@pytest.mark.parametrize("C, columns", [(128, 32), (64, 32), (96, 32), (80, 0), (16, 0)])
def test_only_whole_lines_are_forgotten(C, columns):
    acc = torch.zeros(4096)
    start = -acc.data_ptr() % LINE // 4
    for first, has_pdl in product((0, 1), (True, False)):
        given = SimpleNamespace(
            heads=Heads(4, 8, C, 2),
            parts=Parts(acc[start + first :], acc, 1, 0),
            constants={"PDL": has_pdl},
        )
        assert line_columns(given) == (columns if has_pdl and first == 0 else 0)
