"""8-bit products on a GPU: one bit pattern for all tiles and mixtures; PTX of what they compile to.

The order of sums is in the PTX: each 128 of K begins accumulators anew, and additions follow.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels import is_hopper
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.tiles import ExpertTiles
from specdec.kernels.experts.tiles import candidates as expert_candidates
from specdec.kernels.fp8.products import (
    fp8_split_linear_ref,
    launch_fp8_gate_up,
    launch_fp8_linear,
    launch_fp8_split_linear,
)
from specdec.kernels.fp8.quantise import quantise, quantise_ref
from specdec.kernels.linear import Sums
from specdec.kernels.persistent import launch
from specdec.kernels.sum_order import Order, add_parts
from specdec.kernels.tile_rule import candidates
from specdec.kernels.tile_shapes import (
    FP8,
    GATED_BYTES,
    Product,
    Shape,
    problem_of,
    row_class,
)
from specdec.kernels.tiles import choose_order, cut, gpu_name, of_rows
from tests.specdec.kernels.expert_cases import choices
from tests.specdec.kernels.fp8_cases import fp8_experts, fp8_weight, in_float64

FORMS = pytest.mark.parametrize("is_block", [False, True])
BF16 = torch.bfloat16
ROWS = (*range(1, 65), 65, 100, 256, 1000, 8192)
SOME_ROWS = (1, 9, 16, 33, 64, 65, 128, 256, 300, 1000)
COMPILED = [
    *("rows 64 16 8 split channel", "rows 64 64 6 gate block", "rows 128 16 6 walk block"),
    *("tiles 64 64 6 walk channel", "tiles 64 64 6 gate block", "tiles 128 128 4 split block"),
    *("persistent 128 128 5 walk block", "persistent 128 128 4 gate block"),
    *("persistent 128 256 3 split channel", "persistent 192 128 4 split shared"),
    *("persistent 128 256 3 split shared", "persistent 128 128 4 gate shared"),
    "persistent 128 128 5 walk channel",
    *("persistent 192 96 5 walk block", "persistent 128 128 4 gate channel 4"),
]
SPILLING = "persistent 128 128 5 walk channel"  # sums that wait between loops
QUICK = "rows 64 32 6 gate block"


@pytest.mark.parametrize(
    "words", [QUICK, *(pytest.param(words, marks=pytest.mark.slow) for words in COMPILED)]
)
def test_each_128_columns_have_an_accumulator_of_their_own(words):
    """In a process without the interpreter, for which kernels are something else."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_fp8", *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _shared, spilled, num_products, num_fresh, beyond = map(int, done.stdout.split())
    assert num_products == 4 * num_fresh > 0, "a block of 128 is four products of 32"
    assert beyond >= 0, "an addition for each register of those"
    assert spilled <= 64 or words.startswith(SPILLING), "registers of a thread"


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_results_of_gates_fit_beside_the_ring(dtype, monkeypatch):
    """Those of a float32 engine in blocks of fewer rows; the deepest ring leaves no more."""
    launched = []
    kernel = {(4,): lambda *given, **_: launched.append(given)}
    monkeypatch.setattr(launch, "persistent_kernel", kernel)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda _: 132)
    K, N = 256, 256
    product, shape = Product("gate", 2 * N, K, FP8), Shape(128, 128, 128, 4, 4, 1)
    assert problem_of(product, 256, shape) is None
    x = quantise_ref(torch.randn(256, K), True)
    launch_fp8_gate_up(x, fp8_weight(2 * N, K, True), None, dtype, cut(shape, 256, Order(1, 1)))
    [(out_desc, *_)] = launched
    assert math.prod(out_desc.block_shape) * dtype.itemsize * 4 <= GATED_BYTES - 1024


def multiply(kind, x, weight, tiles=None):
    if kind == "gate":
        return launch_fp8_gate_up(x, weight, None, BF16, tiles)
    return Sums(launch_fp8_split_linear(x, weight, BF16, tiles=tiles), None).finish(BF16)


def every_tile(kind, N, K, T, device):
    """Tiles that tuning may choose for T rows."""
    product, rows = Product(kind, N, K, FP8), row_class(T)
    order = choose_order(product, gpu_name(device))
    shapes = candidates(product, rows, of_rows(order, rows), is_hopper(device))
    return [cut(shape, rows, order) for shape in shapes]


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize(
    "kind, N, K",
    [
        *(("split", 6144, 4096), ("split", 4096, 4096), ("gate", 28672, 4096)),
        *(("split", 4096, 14336), ("split", 1536, 1056), ("gate", 1056, 320)),
    ],
)
def test_tiles_change_no_bit(kind, N, K, is_block):
    torch.manual_seed(0)
    device = torch.device("cuda")
    weight = fp8_weight(N, K, is_block, device)
    rows = torch.randn(max(SOME_ROWS), K, device=device, dtype=BF16)
    order = choose_order(Product(kind, N, K, FP8), gpu_name(device))
    simple = cut(Shape(64, 64, 128, 3, 4), 64, order)
    parts = (quantise(part, is_block) for part in rows.split(64))
    expected = torch.cat([multiply(kind, x, weight, simple) for x in parts])
    jobs = [(T, tiles) for T in SOME_ROWS for tiles in every_tile(kind, N, K, T, device)]
    with compiling_ahead(device, progress=False):
        for T, tiles in jobs:
            multiply(kind, quantise(rows[:T], is_block), weight, tiles)
    for T, tiles in jobs:
        found = multiply(kind, quantise(rows[:T], is_block), weight, tiles)
        assert torch.equal(found, expected[:T]), (T, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, N, K", [("split", 4096, 4096), ("gate", 4096, 1024)])
def test_scales_that_rows_share_change_no_bit(kind, N, K):
    """What a weight says of its scales makes products faster, and nothing else."""
    torch.manual_seed(0)
    weight = fp8_weight(N, K, True, "cuda")
    weight = weight._replace(scales=weight.scales[:, ::64].repeat_interleave(64, 1).contiguous())
    for T in (9, 300, 2048):
        x = quantise(torch.randn(T, K, device="cuda", dtype=BF16), True)
        every = every_tile(kind, N, K, T, torch.device("cuda"))
        for tiles in every:
            found = multiply(kind, x, weight._replace(is_shared=True), tiles)
            assert torch.equal(found, multiply(kind, x, weight, tiles)), (T, tiles)


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("kind, N, K", [("split", 4096, 4096), ("gate", 4096, 1024)])
def test_a_row_has_its_bits_in_every_mixture(kind, N, K, is_block):
    """With the tiles that are chosen, and places that go through all rows."""
    torch.manual_seed(0)
    weight = fp8_weight(N, K, is_block, "cuda")
    rows = torch.randn(max(ROWS), K, device="cuda", dtype=BF16)
    expected = multiply(kind, quantise(rows, is_block), weight)
    for T in ROWS:
        first = 37 * T % (len(rows) - T + 1)
        found = multiply(kind, quantise(rows[first : first + T], is_block), weight)
        assert torch.equal(found, expected[first : first + T]), T


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("T", [1, 64, 256, 1000])
@pytest.mark.parametrize("N, K", [(4096, 14336), (4096, 4096)])
def test_sums_are_close_to_the_twin_and_to_float64(N, K, T, is_block):
    torch.manual_seed(0)
    x = quantise(torch.randn(T, K, device="cuda", dtype=BF16), is_block)
    weight = fp8_weight(N, K, is_block, "cuda")
    found = add_parts(launch_fp8_split_linear(x, weight))
    exact, twin = in_float64(x, weight), fp8_split_linear_ref(x, weight)[0]
    largest = exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() / largest).max() < 1e-3
    assert ((found - twin).abs() / largest).max() < 2e-3


@pytest.mark.gpu
def test_one_accumulator_for_all_columns_is_too_inexact():
    """What the tensor cores keep of a long sum: the bound above is none that anything passes."""
    torch.manual_seed(0)
    x = quantise(torch.randn(64, 14336, device="cuda", dtype=BF16), False)
    weight = fp8_weight(4096, 14336, False, "cuda")
    scales = x.scales[:, None], weight.scales[None]
    found = torch._scaled_mm(
        *(x.codes_TK, weight.codes_NK.t(), *scales),
        out_dtype=BF16,
        use_fast_accum=True,
    )
    exact = in_float64(x, weight)
    rounded = exact.to(BF16).double()
    largest = exact.abs().amax(1, keepdim=True)
    assert ((found - rounded).abs() / largest).max() > 1e-3


@pytest.mark.gpu
@FORMS
def test_inputs_are_those_that_the_kernel_before_writes(is_block):
    """A chain in a graph, each product of the quantised result before: no code is read early."""
    torch.manual_seed(0)
    weights = [fp8_weight(4096, 4096, is_block, "cuda") for _ in range(8)]
    x = torch.randn(9, 4096, device="cuda", dtype=BF16)

    def chain():
        y = x
        for weight in weights:
            y = launch_fp8_linear(quantise(y, is_block), weight, None, BF16)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        y = x
        for weight in weights:
            codes = quantise(y, is_block)
            torch.cuda.synchronize()
            y = launch_fp8_linear(codes, weight, None, BF16)
            torch.cuda.synchronize()
        assert torch.equal(out, y)


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("how", ["drawn", "one", "padded"])
def test_experts_have_the_bits_of_rows_in_every_mixture(how, is_block):
    torch.manual_seed(0)
    E, k, D, I = 128, 8, 2048, 768
    weights = fp8_experts(E, D, I, is_block, "cuda")
    rows = torch.randn(8192, D, device="cuda", dtype=BF16)
    ids = choices(len(rows), E, k, "cuda", how)
    is_chosen = (ids < E).T
    expected = launch_expert_parts(rows, ids, *weights)
    for T in (*range(1, 18), 33, 64, 65, 256, 1000):
        found = launch_expert_parts(rows[:T], ids[:T].contiguous(), *weights)
        assert torch.equal(found[is_chosen[:, :T]], expected[:, :T][is_chosen[:, :T]]), T


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("T, block_m", [(16, 16), (64, 64), (300, 32), (1000, 128)])
def test_tiles_of_experts_change_no_bit(T, block_m, is_block):
    torch.manual_seed(0)
    E, k, D, I = 32, 4, 1024, 768
    weights = fp8_experts(E, D, I, is_block, "cuda")
    x = torch.randn(T, D, device="cuda", dtype=BF16)
    ids = choices(T, E, k, "cuda")
    expected = launch_expert_parts(x, ids, *weights)
    for gate_up in expert_candidates("gate_up", block_m, D, "fp8"):
        for down in expert_candidates("down", block_m, I, "fp8"):
            tiles = ExpertTiles(gate_up, down, T > 64)
            found = launch_expert_parts(x, ids, *weights, None, tiles)
            assert torch.equal(found, expected), tiles
