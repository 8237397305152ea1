"""Yardsticks of 8-bit products, and what the suites time with them, on a CPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from specdec.bench import fp8_yardstick, products
from specdec.bench.exactness import scaled_gate_up, scaled_linear, scaled_sums
from specdec.bench.fp8_yardstick import deep_gemm, scaled_mm
from specdec.bench.products import weights_of
from specdec.kernels.backend import Backend, using
from specdec.kernels.fp8 import products as fp8_products
from specdec.kernels.fp8.products import fp8_gate_up_ref, fp8_linear_ref
from specdec.kernels.fp8.quantise import quantise
from specdec.kernels.fp8.weight import Fp8
from tests.specdec.kernels.fp8_cases import fp8_weight, in_float64


def both(is_block=False):
    torch.manual_seed(0)
    return quantise(torch.randn(5, 256), is_block), fp8_weight(64, 256, is_block)


def test_scaled_mm_is_the_product():
    x, weight = both()
    args = x.codes_TK, weight.codes_NK, x.scales, weight.scales, torch.float32
    found = scaled_mm(*args, use_fast_accum=False)
    torch.testing.assert_close(found, in_float64(x, weight).float())


@pytest.fixture
def deep(monkeypatch):
    """A module like DeepGEMM; it notes the shapes of scales."""
    noted = []

    def fp8_gemm_nt(lhs, rhs, out):
        noted.append((tuple(lhs[1].shape), tuple(rhs[1].shape)))
        out.fill_(3)

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    monkeypatch.setattr(fp8_yardstick, "find_spec", lambda _: True)
    fp8_yardstick._of_deep_gemm.cache_clear()
    yield noted
    fp8_yardstick._of_deep_gemm.cache_clear()


def test_deep_gemm_takes_the_scales_of_blocks(deep):
    x, weight = both(True)
    assert (products._deep_gemm(x, weight)() == 3).all()
    assert deep == [((5, 2), (1, 2))]


def test_deep_gemm_that_is_not_installed_is_said():
    fp8_yardstick._of_deep_gemm.cache_clear()
    with pytest.raises(RuntimeError, match="DeepGEMM is not installed"):
        deep_gemm(*(torch.empty(1, 1) for _ in range(4)))


def test_what_exactness_exchanges_is_near_ours():
    x, weight = both()
    bias = torch.randn(64)
    found = scaled_linear(x, weight, bias, torch.float32)
    torch.testing.assert_close(found, fp8_linear_ref(x, weight, bias, torch.float32))
    found = scaled_sums(x, weight, torch.float32)
    expected = fp8_linear_ref(x, weight, None, torch.float32)[None]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    found = scaled_gate_up(x, weight, None, torch.float32)
    torch.testing.assert_close(found, fp8_gate_up_ref(x, weight, None, torch.float32))


def test_a_backend_makes_products_in_place_of_ours(monkeypatch):
    monkeypatch.setattr(fp8_products, "use_triton", lambda _: True)
    monkeypatch.setattr(fp8_products, "pick", lambda _x, launch, _twin: launch)
    x, weight = both()
    one = torch.ones(1)
    names = "fp8_linear", "fp8_split_linear", "fp8_gate_up"
    with using(Backend(**dict.fromkeys(names, lambda *_: one))):
        assert fp8_products.fp8_linear(x, weight, None, torch.float32) is one
        assert fp8_products.fp8_gate_up(x, weight, None, torch.float32) is one
        found = fp8_products.fp8_split_linear(x, weight, None, torch.float32)
    assert found.parts_STN is one


@pytest.mark.parametrize("is_block", [False, True])
def test_products_of_8_bits_are_timed_beside_others(is_block, monkeypatch):
    """And a weight's scales are no weight."""
    monkeypatch.setattr(products, "ROWS", (1,))
    weight = fp8_weight(64, 256, is_block)
    name = "layers.0.mlp.gate_up_proj.weight"
    tensors = {"embed_tokens.weight": torch.empty(8, 64), "lm_head.weight": torch.randn(8, 256)}
    tensors |= {name: weight.codes_NK, f"{name}_scale": weight.scales}
    config = SimpleNamespace(experts=None)
    pair = SimpleNamespace(target=SimpleNamespace(tensors=tensors, config=config), eagle=None)
    assert [type(each) for found in weights_of(pair).values() for each in found] == [
        torch.Tensor,
        Fp8,
    ]
    bench = SimpleNamespace(pair=pair, skipped=[], bandwidth=1e9, has_time=lambda _: True)
    rows = [row for row in products.products(bench) if "form" in row]
    assert [row["form"] for row in rows] == ["fp8 block" if is_block else "fp8 channel"]
    assert all(row[name] > 0 for name in ("us", "cublas_us", "slow_accum_us") for row in rows)


@pytest.mark.parametrize("rows", [64, 32])
def test_weights_of_8_bits_are_timed_as_the_model_multiplies_by_them(rows):
    """Rows that share their scales say so, of which products are faster."""
    scales = torch.rand(2, 128 // rows).repeat_interleave(rows, 1)
    name = "layers.0.mlp.down_proj.weight"
    tensors = {"lm_head.weight": torch.empty(8, 256), f"{name}_scale": scales}
    tensors[name] = fp8_weight(128, 256, True).codes_NK
    pair = SimpleNamespace(target=SimpleNamespace(tensors=tensors), eagle=None)
    [weight] = weights_of(pair)["target", "down_proj"]
    assert weight.is_shared == (rows == 64)
