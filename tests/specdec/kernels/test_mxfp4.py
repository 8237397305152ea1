"""Weights of four bits: every number, and the bits of the same weights with a number each."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from specdec.kernels import INTERPRET, triton
from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts.mlp import expert_parts_ref
from specdec.kernels.experts.mxfp4 import ROWS_OF_WORDS, WORDS, dequantised_ref, load_packed
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.route import route
from specdec.kernels.experts.router import router_logits
from specdec.kernels.experts.tiles import ROWS, ExpertTiles, candidates, expert_tiles
from specdec.kernels.linear import Sums, describe
from specdec.kernels.norms import add_rms_norm
from specdec.kernels.tile_shapes import Shape
from tests.specdec.kernels.expert_cases import choices, packed_experts
from tests.weights.mxfp4 import numbers_of
from weights.turned import move_of

tl = triton.language
CLAMP = (1.5, 1.702)
GPT_OSS = (32, 4, 2880, 2880)  # E, k, D, I
GPU_ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 100, 128, 256, 1000, 2048, 8192)


@triton.jit
def _unpack_kernel(
    out_ptr,
    words,
    scales_ptr,
    N,
    K,
    BLOCK_K: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Write [2, N, K] in float32, of two experts."""
    e = tl.program_id(0)
    i = tl.program_id(1)
    tile = load_packed(
        *(words, scales_ptr, e, 0, N, K, i, 1, 128, BLOCK_K, tl.float32, IS_COMPILED),
    )
    n = tl.arange(0, 128)[:, None]
    k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(out_ptr + (e * N + n) * K + k, tile, mask=(n < N) & (k < K))


def every_number(device):
    """Blocks of all bytes with all scales 2 to 128, two experts of 127 rows."""
    blocks = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 16, 16)
    blocks = torch.cat([blocks, blocks.flip(-1)]).repeat(1, 127, 1, 1)
    scales = torch.arange(2, 129, dtype=torch.uint8, device=device).view(1, 127, 1)
    scales = torch.cat([scales, scales.flip(1)]).repeat(1, 1, 16)
    return blocks, scales


def stored(blocks, scales):
    words = move_of("experts.down_proj_blocks").run(blocks).contiguous()
    return words, move_of("experts.down_proj_scales").run(scales).contiguous()


@pytest.mark.parametrize("num_blocks", [16, 15, 14, 13])
def test_the_twin_makes_every_number(num_blocks):
    """Also where blocks are missing at the end of a group of 64, or of four scales."""
    blocks, scales = every_number("cpu")
    blocks, scales = blocks[:, :, :num_blocks], scales[:, :, :num_blocks]
    expected = numbers_of(blocks, scales).float()
    found = dequantised_ref(*stored(blocks, scales), 1)
    assert torch.equal(found[..., : 32 * num_blocks], expected)
    assert (found[..., 32 * num_blocks :] == 0).all()


@pytest.mark.parametrize("num_blocks, block_k", [(16, 64), (16, 128), (13, 128), (15, 64)])
def test_the_kernel_makes_every_number(exact_device, num_blocks, block_k):
    blocks, scales = every_number(exact_device)
    blocks, scales = blocks[:, :, :num_blocks], scales[:, :, :num_blocks]
    K = 32 * num_blocks
    out = torch.full((2, 127, K), float("nan"), device=exact_device)
    grid = (2, -(-K // block_k))
    words, scale_words = stored(blocks, scales)
    _unpack_kernel[grid](
        *(out, describe(words.view(-1, WORDS), 2 * ROWS_OF_WORDS, WORDS), scale_words, 127, K),
        **{"BLOCK_K": block_k, "IS_COMPILED": not INTERPRET},
    )
    assert torch.equal(out, numbers_of(blocks, scales).float())


@pytest.mark.parametrize(
    "E, k, T, dtype",
    [
        (9, 4, 1, torch.float32),
        (9, 4, 2, torch.float16),
        pytest.param(9, 4, 17, torch.float32, marks=pytest.mark.slow),
        pytest.param(9, 4, 33, torch.float16, marks=pytest.mark.slow),
        (9, 4, 65, torch.float32),
    ],
)
def test_parts_have_the_bits_of_plain_weights(exact_device, E, k, T, dtype):
    """Without sorting and with it; 96 and 160 columns are no whole tiles."""
    D, I = (96, 160) if T % 2 else (64, 32)
    packed, plain = packed_experts(E, D, I, exact_device, dtype)
    x = torch.randn(T, D, device=exact_device).to(dtype)
    ids = choices(T, E, k, exact_device, "padded")
    tiles = expert_tiles(T, k, E, D, I, dtype, "packed")
    expected = launch_expert_parts(x, ids, *plain, CLAMP)
    is_chosen = (ids < E).T
    for each in {tiles, tiles._replace(is_sorted=True)}:
        found = launch_expert_parts(x, ids, *packed, CLAMP, each)
        assert torch.equal(found[is_chosen], expected[is_chosen])
    twin = expert_parts_ref(x, ids, *packed, CLAMP)
    assert torch.equal(twin, expert_parts_ref(x, ids, *plain, CLAMP))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(twin[is_chosen], expected[is_chosen], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_k", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_tiles_change_no_bit(exact_device, block_k):
    E, k, D, I, T = 9, 4, 192, 64, 20
    packed, plain = packed_experts(E, D, I, exact_device)
    x, ids = torch.randn(T, D, device=exact_device), choices(T, E, k, exact_device)
    shape = Shape(64, 32, block_k, 3, 4)
    found = launch_expert_parts(x, ids, *packed, CLAMP, ExpertTiles(shape, shape, False))
    assert torch.equal(found, launch_expert_parts(x, ids, *plain, CLAMP))


def test_every_product_has_tiles():
    """Of whole groups of 64 columns, of which a step has no more than two."""
    for block_m in ROWS:
        for part in ("gate_up", "down"):
            for K in (64, 736, 2880):
                found = candidates(part, block_m, K, "packed")
                assert found
                assert {shape.block_k for shape in found} <= {64, 128}


@pytest.mark.slow
def test_no_product_still_reads_registers_that_are_written():
    """Products with 128 columns took so long that some read the next numbers, on an H200."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_experts"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    of_registers = [line.split() for line in done.stdout.splitlines() if "running" in line]
    assert {line[0] for line in of_registers} == {"_expert_kernel"}
    assert {line[-1] for line in of_registers} == {"0"}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["drawn", "one", "padded"])
def test_parts_of_published_sizes_have_the_bits_of_plain_weights(how):
    """Of gpt-oss-20b, for every class of rows, without sorting and with it."""
    torch.manual_seed(0)
    E, k, D, I = GPT_OSS
    packed, plain = packed_experts(E, D, I, "cuda", torch.bfloat16)
    every = torch.randn(max(GPU_ROWS), D, device="cuda").to(torch.bfloat16)
    all_ids = choices(len(every), E, k, "cuda", how)

    def launches(T):
        args = every[:T], all_ids[:T]
        tiles = expert_tiles(T, k, E, D, I, torch.bfloat16, "packed")
        ways = {tiles, tiles._replace(is_sorted=True)}
        yield partial(launch_expert_parts, *args, *plain, (7.0, 1.702))
        yield from (partial(launch_expert_parts, *args, *packed, (7.0, 1.702), way) for way in ways)

    compile_all([each for T in GPU_ROWS for each in launches(T)])
    for T in GPU_ROWS:
        is_chosen = (all_ids[:T] < E).T
        expected, *found = (each()[is_chosen] for each in launches(T))
        assert all(torch.equal(each, expected) for each in found), T


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 300])
def test_all_tiles_of_packed_weights_have_the_same_bits(T):
    torch.manual_seed(0)
    E, k, D, I = 9, 4, 1056, 736
    packed, plain = packed_experts(E, D, I, "cuda", torch.bfloat16)
    x = torch.randn(T, D, device="cuda").to(torch.bfloat16)
    ids = choices(T, E, k, "cuda")
    expected = launch_expert_parts(x, ids, *plain, CLAMP)
    ways = []
    for block_m in ROWS:
        first, second = (candidates(part, block_m, D, "packed") for part in ("gate_up", "down"))
        pairs = (*((a, second[0]) for a in first), *((first[0], b) for b in second))
        has_both = block_m in (16, 32, 64) and block_m >= T
        for is_sorted in (False, True) if has_both else (True,):
            ways += [ExpertTiles(*pair, is_sorted) for pair in pairs]
    launches = [partial(launch_expert_parts, x, ids, *packed, CLAMP, way) for way in ways]
    compile_all(launches)
    for way, launch in zip(ways, launches, strict=True):
        assert torch.equal(launch(), expected), way


def compile_all(launches):
    """Compile what launches need at once."""
    with compiling_ahead(torch.device("cuda"), progress=False):
        for launch in launches:
            launch()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 300])
def test_a_packed_layer_replays_with_other_rows(T):
    """With the router's bias and the clamp, from the router to the next norm in a graph."""
    torch.manual_seed(0)
    E, k, D, I = 9, 4, 1056, 736
    packed, _ = packed_experts(E, D, I, "cuda", torch.bfloat16)
    router = torch.randn(E, D, device="cuda").to(torch.bfloat16)
    bias, norm = (torch.ones(n, device="cuda").to(torch.bfloat16) for n in (E, D))
    x, residual = torch.randn(2, T, D, device="cuda").to(torch.bfloat16)

    def layer():
        ids, shares, _ = route(router_logits(x, router, bias), k, True)
        parts = launch_expert_parts(x, ids, *packed, CLAMP)
        return add_rms_norm(Sums(parts, None, shares), residual, norm, 1e-5)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layer()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, layer(), strict=True))
