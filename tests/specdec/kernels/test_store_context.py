"""Keys and values of all layers from one product: the bits that each layer's own store has."""

import pytest
import torch

from specdec.kernels.linear import Sums
from specdec.kernels.rotate_and_store import HeadNorms, rotate_and_store_ref
from specdec.kernels.store_context import KeyNorms, store_context
from tests.specdec.kernels.by_kernel import by_kernel

L, S = 3, 64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def case(device, G, C, splits, dtype, T=5):
    """Rows of some requests, one of them padding; caches start as NaN."""
    parts = torch.randn(splits, T, L * 2 * G * C, device=device)
    parts = parts.to(dtype) if splits == 1 else parts
    angles = torch.rand(200, C // 2, device=device)
    slots = torch.tensor([3, 64, -1, 127, 130], device=device)[:T]
    positions = torch.tensor([3, 70, 0, 199, 11], device=device)[:T]
    caches = torch.full((L, 2, 4, G, S, C), torch.nan, dtype=dtype, device=device)
    return Sums(parts, None), (angles.cos(), angles.sin()), (positions, slots), caches


@pytest.mark.parametrize("has_norms, has_bias", [(True, False), (False, True)])
@pytest.mark.parametrize("G, C, splits", [(2, 8, 1), (8, 16, 2), (1, 12, 1)])
@pytest.mark.parametrize("by", [by_kernel(store_context), store_context])
def test_each_layer_gets_what_a_store_of_its_own_writes(
    device, by, G, C, splits, has_norms, has_bias
):
    kv, rope, rows, caches = case(device, G, C, splits, torch.float32)
    bias = torch.randn(L * 2 * G * C, device=device) if has_bias else None
    norms = KeyNorms(1 + torch.rand(L, C, device=device), 1e-5) if has_norms else None
    expected = caches.clone()
    for layer in range(L):
        part = Sums(
            kv.parts_STN.chunk(L, dim=2)[layer], None if bias is None else bias.chunk(L)[layer]
        )
        own = None if norms is None else HeadNorms(norms.k_LC[layer], norms.k_LC[layer], 1e-5)
        rotate_and_store_ref(part, rope, own, rows, expected[layer])
    by(kv._replace(bias_N=bias), rope, norms, rows, caches)
    written = ~expected[:, :, :3].isnan()
    assert torch.equal(~caches[:, :, :3].isnan(), written)
    assert written[:, :, 0, :, 3].all()
    assert written[:, :, 2, :, 2].all()
    torch.testing.assert_close(
        caches[:, :, :3], expected[:, :, :3], rtol=1e-6, atol=1e-6, equal_nan=True
    )


def test_a_layer_moves_only_with_its_own_columns(device):
    kv, rope, rows, caches = case(device, 2, 8, 1, torch.float32)
    by_kernel(store_context)(kv, rope, None, rows, caches)
    moved = kv.parts_STN.clone()
    moved[:, :, 2 * 16 : 4 * 16] += 1  # layer 1
    others = torch.full_like(caches, torch.nan)
    by_kernel(store_context)(Sums(moved, None), rope, None, rows, others)
    assert torch.equal(others[0].nan_to_num(), caches[0].nan_to_num())
    assert torch.equal(others[2].nan_to_num(), caches[2].nan_to_num())
    assert not torch.equal(others[1].nan_to_num(), caches[1].nan_to_num())
