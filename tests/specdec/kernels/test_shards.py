"""Products of weights that several GPUs share: rows or columns of one, with the bits of all.

Column-parallel: a rank has some rows of W, and its columns of the result. Row-parallel: it has
neighbouring columns, and leaves parts, which are added to one and by readers to the others'.
"""

import pytest
import torch

from specdec.kernels.gate_up import gate_up_ref, launch_gate_up
from specdec.kernels.linear import (
    Sums,
    launch_linear,
    launch_split_linear,
    linear_ref,
    split_linear,
    split_linear_ref,
)
from specdec.kernels.sum_order import add_parts, splits_of
from specdec.models.layers import Linear
from tests.specdec.kernels.by_kernel import by_kernel

RANKS = (2, 4)
GPU = pytest.mark.gpu


def columns(x, n):
    return [each.contiguous() for each in x.chunk(n, dim=1)]


def gathered(multiply, x, w, n):
    """What a reader makes of the parts of n ranks."""
    whole = tuple(w.shape)
    parts = [
        multiply(x_rank, w_rank, torch.float32, 0, whole=whole)
        for x_rank, w_rank in zip(columns(x, n), columns(w, n), strict=True)
    ]
    parts = [add_parts(part)[None] for part in parts]  # as the exchange does
    return Sums(torch.cat(parts), None).finish(torch.float32)


def finished(multiply, x, w):
    return Sums(multiply(x, w, torch.float32, 0), None).finish(torch.float32)


@pytest.mark.parametrize("rows", [1, 70, 513])
@pytest.mark.parametrize(
    "N, K, dtype", [(96, 256, torch.float32), (64, 768, torch.float16), (40, 1536, torch.float16)]
)
def test_parts_of_ranks_add_up_to_the_bits_of_the_whole(exact_device, rows, N, K, dtype):
    x, w = (torch.randn(n, K, device=exact_device).to(dtype) for n in (rows, N))
    assert splits_of(N, K) == 4
    whole = finished(launch_split_linear, x, w)
    for n in RANKS:
        assert torch.equal(gathered(launch_split_linear, x, w, n), whole), n


@pytest.mark.parametrize("rows", [1, 8, 17, 70, 200])
@pytest.mark.parametrize("N, K", [(96, 256), (256, 256), (256, 768), (600, 512), (40, 1536)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_ranks_add_up_to_the_bits_of_the_whole_on_a_cpu(rows, N, K, dtype):
    torch.manual_seed(0)
    x, w = (torch.randn(n, K).to(dtype) for n in (rows, N))
    whole = finished(split_linear_ref, x, w)
    for n in RANKS:
        assert torch.equal(gathered(split_linear_ref, x, w, n), whole), n


def test_a_part_is_neither_rounded_nor_biased():
    torch.manual_seed(0)
    x, w, bias = torch.randn(5, 256).bfloat16(), torch.randn(96, 256).bfloat16(), torch.randn(96)
    part = split_linear(x[:, :128], w[:, :128], bias.bfloat16(), whole=(96, 256))
    assert part.parts_STN.dtype == torch.float32
    alone = split_linear(x[:, :128], w[:, :128], whole=(96, 256))
    assert torch.equal(part.parts_STN, alone.parts_STN)
    rounded = split_linear(x, w, whole=(96, 256))
    assert rounded.parts_STN.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 17, 600])
def test_the_kernel_leaves_parts_of_few_rows_of_a_rank(exact_interpreter, rows):
    x, w = torch.randn(rows, 4096), torch.randn(64, 4096)
    call = by_kernel(split_linear)
    assert len(call(x, w).parts_STN) == (1 if rows > 512 else 4)
    for n, expected in ((2, 1 if rows > 64 else 2), (4, 1)):
        part = call(x[:, : 4096 // n], w[:, : 4096 // n].contiguous(), whole=(64, 4096))
        assert len(part.parts_STN) == expected


def shards(w, n, halves):
    """Rows of each rank: of each half, if these are gate and up."""
    parts = [each.chunk(n) for each in w.chunk(halves)]
    return [torch.cat(of_rank) for of_rank in zip(*parts, strict=True)]


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("N, K", [(192, 64), (96, 1024), (512, 256), (208, 37)])
@pytest.mark.parametrize("n", RANKS)
def test_columns_of_a_rank_have_the_bits_of_the_whole_on_a_cpu(rows, N, K, n):
    """Wherever they lie among the rank's columns."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, K), torch.randn(N, K)
    whole = linear_ref(x, w, None, torch.float32)
    found = [linear_ref(x, each, None, torch.float32) for each in shards(w, n, 1)]
    assert torch.equal(torch.cat(found, 1), whole)
    split = [split_linear_ref(x, each, whole=(N, K))[0] for each in shards(w, n, 1)]
    assert torch.equal(torch.cat(split, 1), split_linear_ref(x, w)[0])
    gated = [gate_up_ref(x, each, None) for each in shards(w, n, 2)]
    assert torch.equal(torch.cat(gated, 1), gate_up_ref(x, w, None))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("n", RANKS)
def test_columns_of_a_rank_have_the_bits_of_the_whole(exact_device, rows, n):
    x = torch.randn(rows, 256, device=exact_device)
    for N in (192, 384):  # of four splits, and of one
        w = torch.randn(N, 256, device=exact_device)
        found = [launch_split_linear(x, each, whole=(N, 256)) for each in shards(w, n, 1)]
        assert torch.equal(torch.cat(found, 2), launch_split_linear(x, w))
    found = [launch_linear(x, each, None, x.dtype) for each in shards(w, n, 1)]
    assert torch.equal(torch.cat(found, 1), launch_linear(x, w, None, x.dtype))
    found = [launch_gate_up(x, each, None) for each in shards(w, n, 2)]
    assert torch.equal(torch.cat(found, 1), launch_gate_up(x, w, None))


def test_a_layer_knows_the_weight_of_which_it_has_a_part():
    torch.manual_seed(0)
    whole = Linear(256, 96)
    whole.weight.copy_(torch.randn(96, 256))
    x = torch.randn(5, 256)
    parts = []
    for rank in range(2):
        layer = Linear(128, 96, whole=(96, 256))
        layer.weight.copy_(whole.weight[:, 128 * rank :][:, :128])
        parts.append(layer.sums(x[:, 128 * rank :][:, :128]).parts_STN)
    sums = Sums(torch.cat(parts), None)
    assert torch.equal(sums.finish(x.dtype), whole.sums(x).finish(x.dtype))


@GPU
@pytest.mark.parametrize("N, K", [(4096, 4096), (4096, 14336), (2560, 9728), (3584, 18944)])
@pytest.mark.parametrize("rows", [1, 6, 16, 33, 64, 100, 150, 300, 512, 600, 1500])
def test_parts_of_ranks_add_up_on_every_kernel_of_a_gpu(N, K, rows):
    """Few rows, many in parts, and many whose splits one program walks; tiles of every class."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, K, device="cuda").bfloat16() for n in (rows, N))
    whole = finished(launch_split_linear, x, w)
    for n in RANKS:
        assert torch.equal(gathered(launch_split_linear, x, w, n), whole), n


@GPU
@pytest.mark.parametrize("rows", [1, 33, 100, 300, 1500])
@pytest.mark.parametrize("N, K", [(6144, 4096), (3072, 2048), (6144, 8192)])
def test_columns_of_a_rank_have_the_bits_of_the_whole_on_every_kernel_of_a_gpu(N, K, rows):
    torch.manual_seed(0)
    x, w = (torch.randn(n, K, device="cuda").bfloat16() for n in (rows, N))
    whole = finished(launch_split_linear, x, w)
    for n in RANKS:
        found = [
            Sums(launch_split_linear(x, each, whole=(N, K)), None).finish(torch.float32)
            for each in shards(w, n, 1)
        ]
        assert torch.equal(torch.cat(found, 1), whole), n
