"""8-bit numbers: codes bit for bit, and sums of rows that depend on nothing but the row."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels.experts.mlp import expert_parts_ref
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import expert_tiles
from specdec.kernels.fp8 import norms, products
from specdec.kernels.fp8.norms import fp8_add_rms_norm, fp8_rms_norm
from specdec.kernels.fp8.products import (
    fp8_gate_up_ref,
    fp8_linear_ref,
    fp8_split_linear,
    fp8_split_linear_ref,
    launch_fp8_gate_up,
    launch_fp8_linear,
    launch_fp8_split_linear,
)
from specdec.kernels.fp8.quantise import empty_codes, launch_quantise, quantise, quantise_ref
from specdec.kernels.fp8.weight import E4M3, Fp8, Fp8Rows
from specdec.kernels.linear import Sums
from specdec.kernels.needed import needed_while
from specdec.kernels.norms import add_rms_norm_ref, launch_add_rms_norm, rms_norm_ref
from specdec.kernels.sum_order import add_parts
from tests.specdec.kernels.expert_cases import choices
from tests.specdec.kernels.fp8_cases import fp8_experts, fp8_weight, hard_rows, in_float64, same

FORMS = pytest.mark.parametrize("is_block", [False, True])


def every_code():
    """The finite codes that are not negative, and their numbers."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).double()
    return torch.arange(0x7F), numbers


def nearest(x):
    """Codes by search: of two that are as near, the even one."""
    codes, numbers = every_code()
    distance = (x.abs().double()[:, None] - numbers).abs()
    is_nearest = distance == distance.min(1, keepdim=True).values
    of_even = torch.where(is_nearest, codes + (codes % 2) * 1000, 10000).min(1).values % 1000
    return (of_even | (torch.signbit(x).long() << 7)).byte()


@FORMS
@pytest.mark.parametrize("run", [quantise_ref, launch_quantise])
def test_codes_are_the_nearest_and_of_two_the_even_one(run, is_block):
    """All numbers of e4m3, all halfway between two, and those beside: the scale is 1."""
    _, numbers = every_code()
    halves = (numbers[1:] + numbers[:-1]) / 2
    above, below = (torch.nextafter(halves.float(), torch.tensor(x)) for x in (1e9, -1e9))
    x = torch.cat([numbers.float(), halves.float(), above, below, torch.tensor([1e-30, -0.0])])
    x = torch.cat([x, -x])
    rows = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    rows = torch.cat([rows, torch.full((len(rows), 1), 448.0)], dim=1)
    found = run(rows, is_block)
    assert (found.scales[..., : len(rows)] == 1).all()
    codes = found.codes_TK.view(torch.uint8)
    assert torch.equal(codes[:, :127].flatten()[: len(x)], nearest(x))


@FORMS
@pytest.mark.parametrize("K", [64, 192, 320, 4240])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_of_the_kernel_are_the_twins(exact_device, K, dtype, is_block):
    x = hard_rows(K, exact_device).to(dtype)
    found, expected = launch_quantise(x, is_block), quantise_ref(x, is_block)
    assert same(found, expected)
    codes = found.codes_TK.float()
    assert torch.equal(codes.isnan(), x.isnan() | x.isinf())
    if dtype == torch.float32:  # 1e-20 has the least scale, and 1e20 is whole
        assert (codes[1] == 0).all()
        assert codes[2].abs().max() == 448


@pytest.mark.parametrize("T", [1, 257])
def test_scales_of_the_highest_tile_lie_inside(T):
    """Of kernel, twin and torch.compile's empty ones; a copy from outside takes longer."""
    rows = torch.ones(T, 320)
    found = launch_quantise(rows, True), quantise_ref(rows, True), empty_codes(rows, True)
    assert {tuple(scales.shape) for _, scales in found} == {(3, 256 if T <= 256 else 512)}


@FORMS
@pytest.mark.parametrize("N, K", [(192, 320), (320, 512)])
def test_kernels_multiply_as_their_twins(exact_device, N, K, is_block):
    """Widths that end within a block; with 512 columns two splits, added here or there."""
    x = quantise_ref(torch.randn(17, K, device=exact_device), is_block)
    weight = fp8_weight(N, K, is_block, exact_device)
    bias = torch.randn(N, device=exact_device)
    found = launch_fp8_linear(x, weight, bias, torch.float32)
    assert_near(found, fp8_linear_ref(x, weight, bias, torch.float32))
    found = launch_fp8_gate_up(x, weight, bias, torch.float32)
    assert_near(found, fp8_gate_up_ref(x, weight, bias, torch.float32))
    tiles = products.tiles_for("split", x.codes_TK, weight.codes_NK)
    assert (tiles.splits, tiles.parts) == (2 if K == 512 else 1, 1)
    whole = launch_fp8_split_linear(x, weight)[0]
    parts = launch_fp8_split_linear(x, weight, tiles=replace(tiles, parts=tiles.splits))
    assert torch.equal(add_parts(parts), whole)
    expected = fp8_split_linear_ref(x, weight)[0]
    assert_near(whole, expected)
    error = (expected.double() - in_float64(x, weight)).abs().max()
    assert error < 1e-5 * expected.abs().max()


def assert_near(found, expected):
    """Compare with the twin; tensor cores keep 14 bits of a sum of 128, an interpreter all."""
    largest = expected.abs().amax(1, keepdim=True)
    bound = 2e-3 if found.is_cuda else 1e-5
    assert ((found - expected).abs() / largest).max() < bound


@FORMS
def test_a_row_alone_is_a_row_among_others(exact_device, is_block):
    """Of the kernel, where programs walk splits or leave them, and on a CPU of the twin."""
    rows = torch.randn(70, 512, device=exact_device)
    weight = fp8_weight(128, 512, is_block, exact_device)
    every = quantise(rows, is_block)
    whole = launch_fp8_linear(every, weight, None, torch.float32)
    twin = fp8_split_linear_ref(every, weight)[0]
    for T in (1, 16):
        x = quantise(rows[:T], is_block)
        assert torch.equal(launch_fp8_linear(x, weight, None, torch.float32), whole[:T])
        if exact_device == "cpu":  # a GPU's has cuBLAS's sums
            assert torch.equal(fp8_split_linear_ref(x, weight)[0], twin[:T])


@FORMS
def test_halves_of_the_columns_add_up_to_the_bits_of_all(is_block):
    torch.manual_seed(0)
    N, K = 64, 512
    rows, weight = torch.randn(3, K), fp8_weight(N, K, is_block)
    x = quantise(rows, is_block)
    parts = []
    for half in (slice(0, 256), slice(256, 512)):
        groups = slice(half.start // 128, half.stop // 128)
        of_x, of_w = (s[groups] if is_block else s for s in (x.scales, weight.scales))
        columns = Fp8Rows(x.codes_TK[:, half], of_x), Fp8(weight.codes_NK[:, half], of_w)
        parts.append(fp8_split_linear(*columns, None, torch.float16, whole=(N, K)).parts_STN[0])
    assert parts[0].dtype == torch.float32
    whole = fp8_split_linear(x, weight, None, torch.float32).parts_STN[0]
    assert torch.equal(parts[0] + parts[1], whole)


@FORMS
@pytest.mark.parametrize("D", [64, 320])
def test_norms_leave_the_codes_of_the_norm(exact_device, D, is_block, monkeypatch):
    """And the stream, with a tap, of products with a bias and of experts."""
    x, residual, weight = (torch.randn(n, D, device=exact_device).half() for n in (5, 5, 1))
    monkeypatch.setattr(norms, "use_triton", lambda _: True)
    found = fp8_rms_norm(x, weight[0], 1e-5, is_block)
    assert same(found, quantise_ref(rms_norm_ref(x, weight[0], 1e-5), is_block))
    parts = torch.randn(2, 5, D, device=exact_device)
    shares = torch.rand(5, 2, device=exact_device)
    for sums in (Sums(parts, weight[0]), Sums(parts.half(), None, shares)):
        tap = torch.zeros_like(residual)
        given = sums, residual, weight[0], 1e-5
        found, nothing, stream = fp8_add_rms_norm(*given, is_block, tap)
        assert nothing is None
        expected, expected_stream = add_rms_norm_ref(*given)
        assert torch.equal(stream, tap)
        both, plain, again = fp8_add_rms_norm(*given, is_block, tap.zero_(), True)
        assert same(both, found)
        assert torch.equal(plain, launched_norm(*given))
        assert torch.equal(again, stream)
        assert torch.equal(tap, stream)
        torch.testing.assert_close(stream, expected_stream)
        if torch.equal(stream, expected_stream):  # interpreted; a GPU adds experts in one rounding
            assert same(found, quantise_ref(expected, is_block))


def launched_norm(x, residual, weight, eps):
    out = torch.empty_like(residual)
    launch_add_rms_norm(out, None, x, residual, weight, eps, None)
    return out


@FORMS
@pytest.mark.parametrize("T", [1, *(pytest.param(T, marks=pytest.mark.slow) for T in (17, 65))])
def test_experts_have_the_bits_of_dense_products(exact_device, T, is_block):
    """Sorted and not; the twin within what its order of 128 numbers leaves."""
    E, k, D, I = 5, 2, 192, 160
    weights = fp8_experts(E, D, I, is_block, exact_device)
    x = torch.randn(T, D, device=exact_device).half()
    ids = choices(T, E, k, exact_device)
    tiles = expert_tiles(T, k, E, D, I, x.dtype, "fp8")
    expected = one_by_one(x, ids, weights)
    codes = launch_quantise(x, is_block)
    for each in {tiles, tiles._replace(is_sorted=True)}:
        assert torch.equal(launch_expert_parts(x, ids, *weights, None, each), expected)
        noise = torch.full_like(x, torch.nan)  # with codes of x nothing reads x
        assert torch.equal(launch_expert_parts(noise, ids, *weights, None, each, codes), expected)
    twin = expert_parts_ref(x, ids, *weights)
    torch.testing.assert_close(twin, expected, rtol=1e-2, atol=5e-2)


def one_by_one(x, ids, weights):
    """One expert after another by the kernels of dense layers."""
    gate_up, down = weights
    parts = x.new_empty(ids.shape[1], *x.shape)
    for e in ids.unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        codes = quantise(x[rows], gate_up.is_block)
        h = launch_fp8_gate_up(codes, Fp8(gate_up.data[e], gate_up.scales[e]), None, x.dtype)
        codes = quantise(h, down.is_block)
        parts[slots, rows] = launch_fp8_linear(
            codes, Fp8(down.data[e], down.scales[e]), None, x.dtype
        )
    return parts


def test_a_product_that_is_not_needed_writes_nothing(exact_device):
    x = quantise(torch.randn(3, 128, device=exact_device), True)
    weight = fp8_weight(64, 128, True, exact_device)
    out = torch.full((3, 64), 7.0, device=exact_device)
    tiles = products.tiles_for("whole", x.codes_TK, weight.codes_NK)
    with needed_while(torch.zeros(1, dtype=torch.int64, device=exact_device)):
        products._launch(out, x, weight, None, tiles)
    assert (out == 7).all()


def test_rows_and_weights_of_two_forms_are_not_multiplied(exact_device):
    x = quantise(torch.randn(3, 128, device=exact_device), True)
    weight = fp8_weight(64, 128, False, exact_device)
    with pytest.raises(AssertionError):
        launch_fp8_linear(x, weight, None, torch.float32)
