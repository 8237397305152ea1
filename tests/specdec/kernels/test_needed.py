"""Kernels of a pass that is not needed: they return at once, and read no weights."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.kernels import best_children, best_token, gate_up, linear
from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.needed import need, needed_while
from specdec.kernels.rotate_and_store import rotate_and_store
from tests.specdec.kernels.attention_cases import launches_of
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.test_kernels import attention_case
from tests.specdec.kernels.tree_cases import chain, random_tree, tree_case

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNTOUCHED = -7.0


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return request.param


@pytest.fixture
def untouched(monkeypatch):
    """Memory that kernels ask for holds a number that none of them writes."""

    def filled(*sizes, dtype, device):
        return torch.full(_flat(sizes), int(UNTOUCHED), dtype=dtype, device=device)

    new_empty = torch.Tensor.new_empty

    def filled_like(x, *sizes, **how):
        return new_empty(x, *sizes, **how).fill_(UNTOUCHED)

    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, UNTOUCHED))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled_like)


def _flat(sizes):
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def products(x, weight):
    """What each kernel of weights leaves."""
    yield linear.launch_linear(x, weight, None, torch.float32)
    yield linear.launch_split_linear(x, weight)
    yield gate_up.launch_gate_up(x, weight, None)
    yield from best_token.launch_tile_maxima(x, weight, None, has_sums=True)
    yield from best_children.launch_best_children(x.float(), 3, None)


@pytest.mark.parametrize("rows", [1, 20])
def test_products_that_are_not_needed_write_nothing(device, untouched, rows):
    x, weight = torch.randn(rows, 64, device=device), torch.randn(96, 64, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    with needed_while(count):
        for out in products(x, weight):
            assert (out == UNTOUCHED).all()
    expected = list(products(x, weight))
    count.fill_(2)
    with needed_while(count):
        found = list(products(x, weight))
    for out, there in zip(found, expected, strict=True):
        assert torch.equal(out, there)
        assert (out != UNTOUCHED).all()


def test_keys_and_values_that_are_not_needed_are_not_stored(device):
    T, H, G, C = 3, 4, 2, 16
    qkv = linear.Sums(torch.randn(1, T, (H + 2 * G) * C, device=device), None)
    rope = torch.rand(9, C // 2, device=device), torch.rand(9, C // 2, device=device)
    places = torch.arange(T, device=device)
    cache = torch.full((2, 2, G, 64, C), UNTOUCHED, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    with needed_while(count):
        by_kernel(rotate_and_store)(qkv, rope, None, (places, places), cache)
        assert (cache == UNTOUCHED).all()
        count.fill_(1)
        by_kernel(rotate_and_store)(qkv, rope, None, (places, places), cache)
    assert (cache[:, 0, :, :T] != UNTOUCHED).all()


def attention_of(kind, device):
    """Queries, cache and rows of a level of the draft's, of chains or of trees."""
    if kind == "trees":
        trees = [random_tree(70, 4, 3), chain(10, 4)]
        case = tree_case(trees, H=4, G=2, C=16, device=device)
        return case.q, case.cache, case.tree
    return attention_case((300, 40), (1, 1), 4, 2, 16, device, torch.float32)


@pytest.mark.parametrize(
    "kind", ["chains", "many chains", pytest.param("long chains", marks=pytest.mark.slow), "trees"]
)
def test_attention_that_is_not_needed_writes_nothing(device, monkeypatch, kind):
    if kind == "long chains":  # which programs of another kernel share
        monkeypatch.setattr(launch_plan, "ALONE_KEYS", 200)
        monkeypatch.setattr(launch_plan, "FULL", 4)
    if kind == "many chains":  # whose splits one program walks
        monkeypatch.setattr(launch_plan, "FULL", 1)
    q, cache, rows = attention_of(kind, device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.full_like(q, UNTOUCHED)
    with needed_while(count):
        launch_paged_attention(q, out, cache, rows)
        assert (out == UNTOUCHED).all()
        count.fill_(1)
        launch_paged_attention(q, out, cache, rows)
    assert (out != UNTOUCHED).all()
    assert len(launches_of(rows)) == {"many chains": 1, "long chains": 3}.get(kind, 2)


def test_the_number_holds_for_the_body_alone():
    count = torch.ones(1, dtype=torch.int64)
    with needed_while(count):
        with needed_while(None):
            assert need() == {"needed_ptr": None}
        assert need()["needed_ptr"] is count
    assert need() == {"needed_ptr": None}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 96])
def test_they_compile_without_a_gpu(tmp_path, head_dim):
    """In a process without the interpreter; a number to look at is loaded.

    And partial results stay in the L2 cache, whichever kernel leaves them, until they are added up.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_needed"]
    command += [str(tmp_path), str(head_dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 10
    assert all(int(needed) > int(plain) for _, plain, needed in lines)
    for name in ("paged_attention_kernel", "share_splits_kernel", "share_splits_kernel_long"):
        assert "L2::evict_last" in (tmp_path / f"_{name}.ptx").read_text(), name
    for name in ("combine", "combine_long"):
        assert "discard.global.L2" in (tmp_path / f"_{name}_kernel.ptx").read_text(), name
