"""Convolutions over the rows of blocks: kernel, twin and formula; and what they never read."""

import pytest
import torch

from specdec.kernels.convolve import convolve
from specdec.kernels.linear import Sums
from tests.specdec.kernels.by_kernel import by_kernel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def close(dtype):
    return {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-3}


@pytest.mark.parametrize(
    "num_blocks, rows, size, groups, splits, dtype",
    [
        (3, 4, 16, 3, 1, torch.float16),
        (1, 1, 8, 1, 2, torch.float32),
        (2, 2, 40, 30, 4, torch.float32),
    ],
)
def test_rows_are_mixed_with_the_rows_before_them(
    device, num_blocks, rows, size, groups, splits, dtype
):
    """Of 1,200 channels a program has 1,024; parts are added first, and a bias."""
    X, D = num_blocks * rows, size * groups
    parts = torch.randn(splits, X, D, device=device)
    bias = torch.randn(D, device=device).to(dtype) if splits > 1 else None
    x = Sums(parts if splits > 1 else parts.to(dtype), bias)
    base = torch.randn(2, 2, D, device=device).to(dtype)
    changes = torch.randn(X, 4 * groups, device=device).to(dtype)
    for side, half in enumerate(changes.chunk(2, dim=1)):
        found = by_kernel(convolve)(x, base[side], half, rows)
        assert found.dtype == dtype
        torch.testing.assert_close(found, convolve(x, base[side], half, rows), **close(dtype))
        for t in range(X):  # by the formula, channel by channel
            row = x.finish(dtype)[t].float()
            before = x.finish(dtype)[t - 1].float() if t % rows else torch.zeros_like(row)
            change = [
                half[t, i * groups :][:groups].float().repeat_interleave(size) for i in (0, 1)
            ]
            weight = [base[side, i].float() + change[i] for i in (0, 1)]
            expected = (weight[0] * row + weight[1] * before).to(dtype)
            torch.testing.assert_close(found[t], expected, **close(dtype))


@pytest.mark.parametrize("by", [by_kernel(convolve), convolve])
def test_nothing_comes_from_another_block_or_a_later_row(device, by):
    rows, D = 4, 32
    x = torch.randn(3 * rows, D, device=device)
    base = torch.randn(2, D, device=device)
    changes = torch.randn(len(x), 2 * 2, device=device)
    expected = by(Sums(x[None], None), base, changes, rows)
    spoiled = x.clone()
    spoiled[rows - 1] = spoiled[rows + 2 : 2 * rows] = torch.nan  # ends of two blocks
    found = by(Sums(spoiled[None], None), base, changes, rows)
    is_kept = torch.tensor([t not in (rows - 1, rows + 2, rows + 3) for t in range(len(x))])
    assert torch.equal(found[is_kept], expected[is_kept])
    assert found[~is_kept].isnan().all()
