"""What only a GPU can show: streams, the allocator, empty graphs, memory that comes back."""

import gc
import sys
import threading

import pytest
import torch

from graphs.breakable import BreakableCUDAGraphCapture
from graphs.cuda import CudaBackend
from graphs.modes import BatchDescriptor
from graphs.wrapper import capture_graph

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def cuda():
    return CudaBackend(torch.device("cuda"))


@pytest.fixture
def x():
    return torch.ones(MIB, device="cuda")  # 4 MiB


def _reserved():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_the_side_stream_sees_the_work_before_it_and_is_seen_by_the_work_after_it(cuda, x):
    x.fill_(3)
    with cuda.side_stream():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        with cuda.side_stream():
            y = x * 2
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert (y == 6).all()


def test_smaller_captures_reuse_the_memory_of_larger_ones(cuda, x):
    with cuda.side_stream():
        x * 2
    pool = cuda.new_pool()
    graphs = []
    before = _reserved()
    for n in (MIB, MIB // 2, MIB // 3):
        graph, output = capture_graph(pool, BatchDescriptor(n), lambda n=n: x[:n] * 2)
        del output
        graphs.append(graph)
        if n == MIB:
            largest = _reserved()
    assert largest > before
    assert _reserved() == largest


def test_all_memory_comes_back_after_the_graphs_are_reset(cuda, x):
    with cuda.side_stream():
        x * 2
    before = _reserved()
    pool = cuda.new_pool()
    for _ in range(2):
        graph, _ = capture_graph(pool, BatchDescriptor(1), lambda: x * 2)
        graph.replay()
        graph.reset()
        pool.close()
    del graph, _
    assert _reserved() == before


def test_counting_bytes_leaves_the_ids_of_many_pools_alone(cuda):
    pools = [cuda.new_pool() for _ in range(300)]
    ids = [number for pool in pools for number in pool._handle if number > 256]
    assert ids
    before = [sys.getrefcount(ids[i]) for i in range(len(ids))]
    assert sum(pool.num_bytes() for pool in pools for _ in range(3)) == 0
    assert [sys.getrefcount(ids[i]) for i in range(len(ids))] == before


def test_a_pool_counts_its_own_bytes(cuda, x):
    with cuda.side_stream():
        x * 2
    pool = cuda.new_pool()
    other = cuda.new_pool()
    assert pool.num_bytes() == 0
    graph, _ = capture_graph(pool, BatchDescriptor(1), lambda: x * 2)
    held = pool.num_bytes()
    assert 4 * MIB <= held < 64 * MIB
    y = torch.empty(64 * MIB, device="cuda")
    second, _ = capture_graph(other, BatchDescriptor(1), lambda: y * 2)
    assert pool.num_bytes() == held
    assert other.num_bytes() >= y.nbytes
    for each in (graph, second):
        each.reset()
    for each in (pool, other):
        each.close()
    assert pool.num_bytes() == other.num_bytes() == 0


def test_an_empty_capture_is_no_graph_and_the_pool_lives_on(cuda, x):
    pool = cuda.new_pool()
    assert capture_graph(pool, BatchDescriptor(1), lambda: None)[0] is None
    with cuda.side_stream():
        x * 2
    graph, y = capture_graph(pool, BatchDescriptor(1), lambda: x * 2)
    graph.replay()
    assert (y == 2).all()


@pytest.mark.filterwarnings("error")
def test_an_empty_segment_gives_no_warning(cuda):
    with BreakableCUDAGraphCapture(cuda.new_pool()) as capture:
        capture.add_eager(lambda: None)
    assert (capture.num_graphs, capture.num_eager_breaks) == (0, 1)


def test_an_invalid_capture_does_not_disturb_later_allocations(cuda, x):
    pool = cuda.new_pool()
    with pytest.raises(RuntimeError):
        capture_graph(pool, BatchDescriptor(1), lambda: x.sum().item())
    assert not torch.cuda.is_current_stream_capturing()
    y = torch.empty(MIB, device="cuda").fill_(1)
    assert y.sum().item() == MIB
    graph, z = capture_graph(pool, BatchDescriptor(1), lambda: x + y)
    graph.replay()
    assert (z == 2).all()


def test_another_thread_may_allocate_and_synchronise_during_a_capture(cuda, x):
    errors = []

    def work():
        try:
            torch.zeros(64 * MIB, device="cuda").sum().item()
        except RuntimeError as error:
            errors.append(error)

    with cuda.side_stream():
        x * 2
    with BreakableCUDAGraphCapture(cuda.new_pool()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x * 2
    assert not errors


def test_a_captured_product_replays_to_the_same_bits(cuda):
    torch.manual_seed(0)
    a = torch.randn(16, 256, device="cuda")
    w = torch.randn(256, 256, device="cuda")
    with cuda.side_stream():
        expected = a @ w
    graph, y = capture_graph(cuda.new_pool(), BatchDescriptor(1), lambda: a @ w)
    graph.replay()
    assert torch.equal(y, expected)
