"""The experts' kernels have the bits of linear.py and gate_up.py, for every mixture of rows."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels.compilations import compiling_ahead
from specdec.kernels.experts import products
from specdec.kernels.experts.products import launch_expert_parts
from specdec.kernels.experts.route import route
from specdec.kernels.experts.router import router_logits
from specdec.kernels.experts.tiles import (
    FEW_ROWS,
    ROWS,
    ExpertTiles,
    candidates,
    expert_tiles,
    rows_of_tile,
)
from specdec.kernels.linear import Sums
from specdec.kernels.needed import needed_while
from specdec.kernels.norms import add_rms_norm
from specdec.kernels.tile_shapes import ROW_CLASSES, SHARED_MEMORY
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.expert_cases import by_products, choices, experts

BF16 = torch.bfloat16
QWEN3_30B = (128, 8, 2048, 768)  # E, k, D, I
MIXTRAL = (8, 2, 4096, 14336)
GPU_ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 100, 128, 256, 1000, 2048, 8192)


def equal(found, expected):
    """Bit for bit, where an expert was chosen."""
    is_chosen = ~expected.isnan()
    return torch.equal(found[is_chosen], expected[is_chosen])


def both_ways(x, ids, weights):
    """The rule's tiles, and few rows sorted too."""
    gate_up = weights[0]
    sizes = gate_up.num_experts, x.shape[1], gate_up.num_rows // 2
    tiles = expert_tiles(len(x), ids.shape[1], *sizes, x.dtype, gate_up.form)
    return (tiles,) if tiles.is_sorted else (tiles, tiles._replace(is_sorted=True))


def assert_equal_bits(every, args, expected):
    """Compile for all tiles at once, then compare."""
    with compiling_ahead(torch.device("cuda"), progress=False):
        for tiles in every:
            launch_expert_parts(*args, tiles=tiles)
    for tiles in every:
        assert equal(launch_expert_parts(*args, tiles=tiles), expected), (len(args[0]), tiles)


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that kernels ask for holds NaN."""
    new_empty = torch.Tensor.new_empty

    def filled(x, *sizes, **how):
        found = new_empty(x, *sizes, **how)
        return found.fill_(float("nan") if found.is_floating_point() else -(2**31))

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.parametrize(
    "E, k, T",
    [
        *((8, 2, T) for T in (1, 2, 17, 33, 64, 65)),
        *((12, 3, T) for T in (3, 16, 64, 100)),
        *((64, 1, 1), (128, 8, 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((64, 1, 65), (128, 8, 5))),
        (8, 1, 256),
    ],
)
def test_parts_have_the_bits_of_products(exact_device, E, k, T):
    """Without sorting and with it."""
    D, I = 40, 24
    dtype = torch.float16 if T % 2 else torch.float32
    weights = experts(E, D, I, exact_device, dtype)
    x, ids = torch.randn(T, D, device=exact_device).to(dtype), choices(T, E, k, exact_device)
    expected = by_products(x, ids, *weights)
    for tiles in both_ways(x, ids, weights):
        assert equal(launch_expert_parts(x, ids, *weights, tiles=tiles), expected)


@pytest.mark.parametrize("how", ["one", "padded", "nobody"])
@pytest.mark.parametrize("T", [20, 70])
def test_nobodys_rows_are_neither_read_nor_written(exact_device, poisoned, T, how, monkeypatch):
    """All rows to the same experts; padding, whose rows hold NaN; and nothing but padding."""
    monkeypatch.setattr("specdec.kernels.experts.group.use_triton", lambda _: True)
    E, k, D, I = 12, 3, 72, 40
    weights = experts(E, D, I, exact_device)
    x, ids = torch.randn(T, D, device=exact_device), choices(T, E, k, exact_device, how)
    is_row = ids[:, 0] < E
    x[~is_row] = float("nan")
    found = launch_expert_parts(x, ids, *weights)
    assert equal(found, by_products(x, ids, *weights))
    assert found[:, is_row].isfinite().all()
    assert found[:, ~is_row].isnan().all()
    shares = torch.rand(T, k, device=exact_device).where(is_row[:, None], 0.0)
    sums = Sums(found, None, shares)
    norm = torch.ones(D, device=exact_device)
    residual = torch.randn(T, D, device=exact_device)
    _, stream = by_kernel(add_rms_norm)(sums, residual, norm, 1e-5)
    assert stream.isfinite().all()
    assert torch.equal(stream[~is_row], residual[~is_row])


def test_a_row_has_the_same_bits_in_every_mixture(exact_device):
    """Alone, and on both sides of the border between few rows and more."""
    E, k, D, I = 12, 2, 64, 40
    weights = experts(E, D, I, exact_device)
    x, ids = torch.randn(90, D, device=exact_device), choices(90, E, k, exact_device)
    every = launch_expert_parts(x, ids, *weights)
    for first, last in ((0, 1), (5, 21), (20, 84), (20, 85)):
        some = launch_expert_parts(x[first:last], ids[first:last], *weights)
        assert torch.equal(some, every[:, first:last]), (first, last)
    ids[1:] = ids[0]
    assert torch.equal(launch_expert_parts(x, ids, *weights)[:, 0], every[:, 0])


def test_rows_of_a_wider_tensor_are_read(exact_device):
    weights = experts(8, 48, 24, exact_device)
    wide, ids = torch.randn(6, 96, device=exact_device), choices(6, 8, 2, exact_device)
    narrow = wide[:, :48].contiguous()
    assert torch.equal(
        launch_expert_parts(wide[:, :48], ids, *weights),
        launch_expert_parts(narrow, ids, *weights),
    )


@pytest.mark.parametrize("T", [3, 70])
def test_a_pass_that_is_not_needed_writes_nothing(exact_device, poisoned, T):
    weights = experts(8, 48, 24, exact_device)
    x, ids = torch.randn(T, 48, device=exact_device), choices(T, 8, 2, exact_device)
    with needed_while(torch.zeros(1, dtype=torch.int64, device=exact_device)):
        assert launch_expert_parts(x, ids, *weights).isnan().all()
    with needed_while(torch.ones(1, dtype=torch.int64, device=exact_device)):
        assert launch_expert_parts(x, ids, *weights).isfinite().all()


@pytest.mark.parametrize("rows", [*ROW_CLASSES, 2048, 8192])
@pytest.mark.parametrize(
    "E, k, D, I", [(8, 2, 4096, 14336), (128, 8, 2048, 768), (32, 8, 1024, 512), (12, 3, 40, 24)]
)
def test_tiles_keep_the_bits_and_fit(rows, E, k, D, I):
    tiles = expert_tiles(rows, k, E, D, I, BF16, "plain")
    block_m = rows_of_tile(rows, k, E)
    for part, of_w, K, shape in (("gate_up", 2, D, tiles[0]), ("down", 1, I, tiles[1])):
        found = candidates(part, block_m, K)
        assert shape in found
        for each in found:
            size = (of_w * each.block_n + block_m) * each.block_k * 2 * each.num_stages
            assert size <= SHARED_MEMORY
            assert each.block_m == block_m
            assert each.block_n >= 64
    assert block_m in ROWS
    assert tiles.is_sorted == (rows > FEW_ROWS)
    assert tiles.is_sorted or block_m >= rows


def test_all_heights_have_tiles_of_both_products():
    for block_m in ROWS:
        for K in (256, 1024, 1025, 14336):
            assert candidates("gate_up", block_m, K)
            assert candidates("down", block_m, K)


def test_an_experts_rows_mostly_fit_a_tile():
    """If they are drawn; of very many no tile has room."""
    for T, block_m in ((65, 16), (256, 32), (1024, 96), (2048, 160), (8192, 128)):
        tiles = expert_tiles(T, 8, 128, 2048, 768, BF16, "plain")
        assert tiles.gate_up.block_m == tiles.down.block_m == block_m
        mean = T * 8 / 128
        assert block_m == 128 or block_m >= mean + 2 * mean**0.5


def test_grids_depend_on_the_number_of_rows_alone(exact_interpreter, monkeypatch):
    grids = []
    kernel = products._expert_kernel
    noting = type("Noting", (), {"__getitem__": lambda _, grid: grids.append(grid) or kernel[grid]})
    monkeypatch.setattr(products, "_expert_kernel", noting())
    weights = experts(12, 48, 24, "cpu")
    for T in (5, 70):
        x = torch.randn(T, 48)
        for how in ("drawn", "one", "padded", "nobody"):
            launch_expert_parts(x, choices(T, 12, 3, "cpu", how), *weights)
        assert len(set(grids)) == 1, grids  # I and D are one tile
        grids.clear()


@pytest.mark.parametrize("which", [[], pytest.param(["all"], marks=pytest.mark.slow)])
def test_kernels_compile_for_a_hopper_gpu(which):
    """In a process without the interpreter, for which kernels are something else."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_experts", *which]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    multiply = "_expert_kernel"
    assert sum(line[0] == multiply for line in found) == len(found) - 4 >= 2
    for name, shared, num_spilled, *columns in found:
        assert int(shared) <= SHARED_MEMORY
        assert int(num_spilled) <= (64 if which else 0), name  # of shapes that only a search tries
        assert (columns != ["0"]) == (name == multiply)  # on tensor cores
    of_blocks = [line for line in found if "late" in line]  # their scales are asked for in time
    assert len(of_blocks) >= 2
    assert all(line[-2:] == ["late", "0"] for line in of_blocks), of_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [QWEN3_30B, MIXTRAL])
@pytest.mark.parametrize("how", ["drawn", "one", "padded"])
def test_parts_of_published_sizes_have_the_bits_of_products(sizes, how):
    torch.manual_seed(0)
    E, k, D, I = sizes
    weights = experts(E, D, I, "cuda", BF16)
    every = torch.randn(max(GPU_ROWS), D, device="cuda").to(BF16)
    all_ids = choices(len(every), E, k, "cuda", how)
    expected = by_products(every, all_ids, *weights)
    for T in GPU_ROWS:
        x, ids = every[:T], all_ids[:T]
        assert_equal_bits(both_ways(x, ids, weights), (x, ids, *weights), expected[:, :T])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 17, 64, 300, 1000])
def test_all_tiles_have_the_same_bits(T):
    torch.manual_seed(0)
    E, k, D, I = 12, 3, 1000, 712
    weights = experts(E, D, I, "cuda", BF16)
    x, ids = torch.randn(T, D, device="cuda").to(BF16), choices(T, E, k, "cuda", "padded")
    expected = by_products(x, ids, *weights)
    every = [
        ExpertTiles(first, second, is_sorted)
        for block_m in ROWS
        for first in candidates("gate_up", block_m, D)
        for second in candidates("down", block_m, I)
        for is_sorted in ((False, True) if block_m in (16, 32, 64) and block_m >= T else (True,))
    ]
    assert_equal_bits(every, (x, ids, *weights), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 64, 65, 1024])
def test_a_layer_replays_with_other_rows(T, poisoned):
    """From the router to the next norm in a graph, whose buffers hold what was left in them."""
    torch.manual_seed(0)
    E, k, D, I = QWEN3_30B
    weights = experts(E, D, I, "cuda", BF16)
    router = torch.randn(E, D, device="cuda").to(BF16)
    norm, residual = (
        torch.ones(D, device="cuda").to(BF16),
        torch.randn(T, D, device="cuda").to(BF16),
    )
    x, slots = torch.randn(T, D, device="cuda").to(BF16), torch.arange(T, device="cuda")

    def layer():
        ids, shares, _ = route(router_logits(x, router), k, True, slots)
        parts = launch_expert_parts(x, ids, *weights)
        return add_rms_norm(Sums(parts, None, shares), residual, norm, 1e-6)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layer()
    for i in range(5):
        x.normal_()
        slots[T // 2 :] = -1 if i % 2 else 0
        graph.replay()
        replayed = [out.clone() for out in outs]
        assert all(each.isfinite().all() for each in replayed)
        for a, b in zip(replayed, layer(), strict=True):
            assert torch.equal(a, b)
