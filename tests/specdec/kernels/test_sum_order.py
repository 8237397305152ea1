"""The order of sums over K: how many splits, a tree of neighbours, and readers that follow it."""

import pytest
import torch

from specdec.kernels import linear, sum_order
from specdec.kernels.experts.route import route, route_ref
from specdec.kernels.linear import Sums, launch_split_linear
from specdec.kernels.norms import add, add_ref, add_rms_norm, add_rms_norm_ref
from specdec.kernels.rotate_and_store import rotate_and_store, rotate_and_store_ref
from specdec.kernels.sum_order import Order, add_parts, splits_of, splits_of_part
from specdec.kernels.tile_shapes import Shape
from specdec.kernels.tiles import cut
from tests.specdec.kernels.by_kernel import by_kernel


@pytest.mark.parametrize(
    "N, K, splits",
    [
        *((4096, 4096, 4), (4096, 14336, 4)),  # o and down of 8B
        *((2560, 9728, 4), (5120, 4096, 4), (8192, 28672, 4)),  # 4B, Mistral-Nemo's o, 70B
        *((3584, 18944, 4), (896, 896, 2), (896, 4864, 4), (64, 96, 1)),
        *((6144, 4096, 1), (3072, 2048, 2), (5120, 3072, 2), (4096, 1024, 2), (10240, 5120, 1)),
    ],
)
def test_splits_follow_from_the_shape_of_the_weight(N, K, splits):
    assert splits_of(N, K) == splits
    assert splits == 1 or K // splits % sum_order.UNIT == K % splits == 0


def test_a_part_of_a_weight_has_its_share_of_the_splits():
    assert splits_of_part(1024, 4096, (4096, 4096)) == 4  # some rows
    assert [splits_of_part(4096, 4096 // n, (4096, 4096)) for n in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert splits_of_part(1024, 1024, None) == 4


def test_neighbours_are_added_first():
    torch.manual_seed(0)
    parts = torch.randn(4, 64, 64)
    a, b, c, d = parts
    assert torch.equal(add_parts(parts), (a + b) + (c + d))
    assert not torch.equal(add_parts(parts), a + b + c + d)
    for n in (2, 4):
        elsewhere = torch.stack([add_parts(each) for each in parts.chunk(n)])
        assert torch.equal(add_parts(elsewhere), add_parts(parts))


def readers(dtype):
    """Each reader's results of parts [S, 3, 64], by its kernel and by its twin."""
    device = torch.device("cpu")
    residual, norm = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype)
    bias = torch.randn(64).to(dtype)
    angles = torch.rand(8, 8)
    rows = torch.arange(3), torch.tensor([0, 3, 5])

    def normed(function):
        return lambda parts: torch.cat(function(Sums(parts, bias), residual, norm, 1e-5, None))

    def added(function):
        def call(parts):
            out = torch.empty_like(residual)
            function(Sums(parts, bias), residual, out)
            return out

        return call

    def rotated(function):
        def call(parts):
            cache = torch.zeros(2, 2, 1, 8, 16, dtype=dtype, device=device)
            qkv = Sums(parts, None)
            q = function(qkv, (angles.cos(), angles.sin()), None, rows, cache)
            return torch.cat([q.flatten(), cache[:, 0].flatten()])

        return call

    def chosen(function):
        return lambda parts: torch.cat(function(Sums(parts, None), 5, True, None, None)[:2])

    return {
        "norm": (normed(by_kernel(add_rms_norm)), normed(add_rms_norm_ref)),
        "stream": (added(by_kernel(add)), added(add_ref)),
        "heads": (rotated(by_kernel(rotate_and_store)), rotated(rotate_and_store_ref)),
        "router": (chosen(by_kernel(route)), chosen(route_ref)),
    }


@pytest.mark.parametrize("name", ["norm", "stream", "heads", "router"])
@pytest.mark.parametrize("splits", [4, 8, 16])
def test_a_reader_may_find_neighbours_added(exact_interpreter, name, splits):
    for reader in readers(torch.float32)[name]:
        parts = torch.randn(splits, 3, 64)
        whole = reader(parts)
        for n in (1, 2, 4):
            elsewhere = torch.stack([add_parts(each) for each in parts.chunk(n)])
            assert torch.equal(reader(elsewhere), whole), (name, n)
        one_by_one = parts[0]
        for part in parts[1:]:
            one_by_one = one_by_one + part
        assert not torch.equal(reader(one_by_one[None]), whole), name


def order_of(rows: int, splits: int, parts: int, block_m: int = 64) -> dict[str, object]:
    return {"tiles": cut(Shape(64, block_m, 64, 2, 4), rows, Order(splits, parts))}


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("block_m", [64, 48])  # 48: in two pieces
def test_programs_that_walk_splits_leave_the_sums_of_neighbours(exact_device, splits, block_m):
    x, w = (torch.randn(n, 1024, device=exact_device).half() for n in (70, 96))
    every = launch_split_linear(x, w, **order_of(64, splits, splits, block_m))
    assert len(every) == splits
    for parts in {1, 2, splits // 2}:
        found = launch_split_linear(x, w, **order_of(64, splits, parts, block_m))
        expected = torch.stack([add_parts(each) for each in every.chunk(parts)])
        assert torch.equal(found, expected)
    if block_m == 64:
        serial = launch_split_linear(x, w, **order_of(1024, splits, splits, block_m))
        assert torch.equal(serial, add_parts(every)[None])


def test_splits_that_blocks_do_not_fill_are_refused():
    x, w = torch.randn(3, 320), torch.randn(64, 320)
    with pytest.raises(AssertionError):
        linear._multiply(torch.empty(2, 3, 64), x, w, None, order_of(64, 2, 2)["tiles"], 0)
