"""Yardsticks compute what our attention does, and none is the shipped kernel."""

import sys
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F

from specdec.bench.yardsticks import flash_packed, yardsticks
from specdec.kernels.attention import launch, twin

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def no_kernels(monkeypatch):
    """Any function of specdec.kernels raises."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel of ours was called")

    for name, module in list(sys.modules.items()):
        if name.startswith("specdec.kernels"):
            for each, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value.__module__ == name:
                    monkeypatch.setattr(module, each, fail)


def queries(device, Q, L, H=4, G=2, C=64):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return (
        torch.randn(2, heads, length, C, device=device, dtype=dtype)
        for heads, length in ((H, Q), (G, L), (G, L))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("Q, L", [(1, 200), (4, 300), (66, 66)])
def test_each_yardstick_computes_the_same_without_our_kernels(device, Q, L, no_kernels):
    torch.manual_seed(0)
    q, k, v = queries(device, Q, L)
    mask = torch.ones(Q, L, dtype=torch.bool, device=device).tril(L - Q)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = yardsticks(torch.device(device))
    unable = {}
    for name, yardstick in found.items():
        try:
            last = yardstick(q, k)(q, k, v)[:, :, -1]
        except RuntimeError as error:  # a shape that this kernel does not take
            unable[name] = str(error)
        else:
            torch.testing.assert_close(last, expected[:, :, -1], rtol=2e-2, atol=2e-2)
    print(unable)
    assert len(unable) <= (0 if device == "cpu" else 2), unable
    assert set(found) >= ({"math", "flex"} if device == "cpu" else {"flash", "cudnn", "flex"})


def test_packed_rows_are_for_rounds():
    q, k, _ = queries("cpu", 66, 66)
    with pytest.raises(RuntimeError, match="a prompt needs a mask"):
        flash_packed(q, k)


def test_a_yardstick_that_is_our_kernel_is_caught(no_kernels):
    """What the test above would say of one that calls paged_attention."""
    with pytest.raises(AssertionError, match="a kernel of ours"):
        launch.paged_attention(*queries("cpu", 1, 64), None)
    with pytest.raises(AssertionError, match="a kernel of ours"):
        twin.paged_attention_ref(*queries("cpu", 1, 64), None)
