"""The clock of a GPU, in Triton's interpreter: what it launches, compiles and divides by."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels.best_token import NO_TOKEN, launch_write
from specdec.kernels.gate_up import gate_up_ref
from specdec.kernels.linear import Sums, linear_ref
from specdec.kernels.sum_order import Order
from specdec.kernels.tile_shapes import FP8, Product, Shape
from specdec.kernels.tiles import cut
from specdec.tune import gpu_clock
from specdec.tune.gpu_clock import GpuClock, _launch
from specdec.tune.search import Job

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs no GPU")
TILES = cut(Shape(64, 16, 64, 2, 4), 16, Order(1, 1))
SMALL = Product("whole", 64, 64, "float16")


@pytest.fixture
def clock(monkeypatch) -> GpuClock:
    """A clock for which each graph takes half a millisecond."""

    @contextmanager
    def session(owner: object, collect: bool):
        assert not collect, "a collection for each candidate takes longer than all else"
        graph = SimpleNamespace(replay=lambda: None, reset=lambda: None)
        yield SimpleNamespace(begin=lambda: None, end=lambda: graph)

    pool = SimpleNamespace(session=session)
    backend = SimpleNamespace(new_pool=lambda: pool)
    monkeypatch.setattr(gpu_clock, "CudaBackend", lambda device: backend)
    monkeypatch.setattr(gpu_clock, "MOST_COPIES", 2)
    monkeypatch.setattr(gpu_clock, "MOST_CALLS", 4)
    bench = SimpleNamespace(do_bench=lambda call, **options: 0.5)
    errors = gpu_clock.triton.errors
    monkeypatch.setattr(gpu_clock, "triton", SimpleNamespace(testing=bench, errors=errors))
    return GpuClock(torch.device("cpu"))


@pytest.mark.parametrize(
    "product, order",
    [
        (Product("split", 64, 512, "float16"), Order(4, 2)),
        (Product("gate", 128, 64, "float16"), Order(1, 1)),
        (Product("whole", 64, 64, "float16"), Order(1, 1)),
        (Product("whole", 320, 64, "float16"), Order(1, 1)),
    ],
)
def test_the_launched_kernel_computes_the_product(product, order):
    torch.manual_seed(0)
    x, weight = (torch.randn(n, product.K).half() for n in (8, product.N))
    found = _launch(product, x, weight, cut(Shape(64, 16, 64, 2, 4), 16, order))
    if product.kind == "gate":
        expected = gate_up_ref(x, weight, None)
    elif product.N > 4 * product.K:
        best = torch.full((8,), NO_TOKEN)
        launch_write(*found[:2], best)
        assert torch.equal(best, linear_ref(x, weight, None, torch.float32).argmax(1))
        return
    else:
        expected = linear_ref(x, weight, None, torch.float16)
    if product.kind == "split":
        assert len(found) == order.parts
        found = Sums(found, None).finish(torch.float16)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)


def test_the_time_is_that_of_one_call(clock):
    assert clock.time(Job(SMALL, 16, TILES)) == 500.0 / 4
    assert clock.time(Job(SMALL, 16, None)) == 500.0 / 4


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("kind", ["split", "whole", "gate"])
def test_products_of_8_bits_are_timed_in_either_form(clock, kind, is_block):
    clock._is_block = is_block
    product = Product(kind, 128, 128, FP8)
    tiles = cut(Shape(64, 16, 128, 2, 4), 16, Order(1, 1))
    assert clock.time(Job(product, 16, tiles)) == 500.0 / 4
    assert clock.time(Job(product, 16, None)) == 500.0 / 4
    assert all(weight.is_block == is_block for weight in clock._weights)


def test_tiles_that_do_not_run_take_for_ever(clock, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(gpu_clock, "_launch", fail)
    assert clock.time(Job(SMALL, 16, TILES)) == float("inf")


def test_a_gpu_that_fails_ends_the_search(clock, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_clock, "_launch", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        clock.time(Job(SMALL, 16, TILES))


def test_one_kernel_is_compiled_for_all_products(clock, monkeypatch):
    launched = []
    monkeypatch.setattr(
        gpu_clock, "compiling_ahead", lambda device, progress, may_fail: nullcontext()
    )
    monkeypatch.setattr(gpu_clock, "_launch", lambda product, *rest: launched.append(product))
    others = [Product("whole", 128, 64, "float16"), Product("whole", 640, 64, "float16")]
    clock.prepare(Job(product, 16, TILES) for product in (SMALL, *others))
    assert launched == [others[0], others[1]], "a head has a kernel of its own"
