"""What the tape keeps of CUDA, op by op; what both backends do is tested one folder up."""

import time

import pytest
import torch

from graphs.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from graphs.modes import BatchDescriptor
from graphs.protocol import CaptureError
from graphs.tape.backend import TapeBackend
from graphs.wrapper import capture_graph

T = 6


@pytest.fixture
def record(tape):
    """record(fn) captures fn on one pool; returns its graph and output."""
    pool = tape.new_pool()
    owners = iter(range(1, 100))
    return lambda fn: capture_graph(pool, BatchDescriptor(next(owners)), fn)


def _slices(x, i, out):
    out[:, 1:3].copy_(x[:, 2:4])
    out[:, 0] = x[:, 0] * 2


def _index_put(x, i, out):
    out.zero_()
    out.index_put_((i,), x)


def _products(x, i, out):
    a = x.view(1, T, T).expand(2, T, T)
    b = x.t().unsqueeze(0).repeat(2, 1, 1)
    out.copy_(torch.bmm(a, b)[0] + x @ x.t() + torch.nn.functional.linear(x, x, x[0]))


def _factories(x, i, out):
    out.copy_(
        torch.zeros_like(x)
        + torch.arange(T)
        + x.new_zeros(T, 1)
        + torch.full((T, T), 2.5)
        + x.new_ones(1) * x
    )


def _choices(x, i, out):
    values, ids = torch.topk(x, 2, dim=-1)
    best = torch.where(x > 0, x, -x).argmax(dim=-1)
    out[:, :2] = values
    out[:, 2:4] = ids.to(x.dtype)
    out[:, 4] = best.to(x.dtype)
    out[:, 5] = x.max(dim=-1).values


def _cats(x, i, out):
    left, right = x.chunk(2, dim=-1)
    torch.cat([right, torch.stack([left[:, 0], left[:, 1], left[:, 2]], dim=-1)], dim=-1, out=out)


def _softmax(x, i, out):
    out.copy_(torch.softmax(x.float(), dim=-1).to(torch.bfloat16).to(x.dtype))


def _gathers(x, i, out):
    table = x.reshape(-1)[:T]
    out.copy_(
        torch.nn.functional.embedding(i, x)
        + table[i][:, None]
        + torch.gather(x, 1, i[:, None])
        + x[i]
    )


def _norms(x, i, out):
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    out.add_(1).mul_(torch.nn.functional.silu(x))


def _masked_fill(x, i, out):
    out.copy_(x)
    out[x > 0] = 0
    out.masked_fill_(x < -1, 7)


def _cumulates(x, i, out):
    out.copy_(
        torch.cumsum(x, 0)
        + torch.nn.functional.layer_norm(x, (T,))
        + x.contiguous().flatten().view(T, T)
    )


CASES = [
    _slices,
    _index_put,
    _products,
    _factories,
    _choices,
    _cats,
    _softmax,
    _gathers,
    _norms,
    _masked_fill,
]


@pytest.mark.parametrize("case", [*CASES, _cumulates], ids=lambda case: case.__name__[1:])
@pytest.mark.parametrize("is_inference", [True, False])
def test_replay_is_eager_bit_for_bit(record, case, is_inference):
    with torch.inference_mode(is_inference), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(T, T)
        i = torch.randperm(T)
        out = torch.zeros(T, T)
        graph, _ = record(lambda: case(x, i, out))
        for _ in range(2):
            x.normal_()
            i.copy_(torch.randperm(T))
            out.fill_(9)
            expected = torch.full((T, T), 9.0)
            case(x, i, expected)
            graph.replay()
            assert torch.equal(out, expected)


def test_a_capture_leaves_every_buffer_as_it_was(record):
    x = torch.ones(3)
    cache = torch.arange(6.0)

    def forward():
        cache[2:4] = x[:2]
        x.add_(1)
        cache.mul_(x.sum())

    record(forward)
    assert (x.tolist(), cache.tolist()) == ([1, 1, 1], [0, 1, 2, 3, 4, 5])


def test_rows_written_twice_over_whole_buffers_are_put_back(record):
    x = torch.ones(2, 2)
    slots = torch.tensor([3, 1])
    cache = torch.arange(10.0).view(5, 2)

    def forward():
        cache.index_put_((slots,), x)
        slots.add_(1)
        cache[:, 1:].mul_(2)
        cache[slots] = x * 7
        cache[slots, :1] += 1

    before = cache.clone()
    graph = record(forward)[0]
    assert torch.equal(cache, before)
    assert slots.tolist() == [3, 1]
    graph.replay()
    assert cache.tolist() == [[0, 2], [1, 2], [8, 7], [1, 2], [8, 7]]


def test_results_are_garbage_until_the_first_replay(record):
    x = torch.ones(3)
    graph, (floats, ints) = record(lambda: (x * 2, x.long() + 4))
    assert floats.isnan().all()
    assert ints.tolist() == [-1, -1, -1]
    graph.replay()
    assert (floats.tolist(), ints.tolist()) == ([2, 2, 2], [5, 5, 5])


def test_a_replay_spoils_the_results_of_other_captures_of_the_pool(record):
    x = torch.ones(3)
    first, y = record(lambda: x * 2)
    second, z = record(lambda: x * 3)
    first.replay()
    assert y.tolist() == [2, 2, 2]
    second.replay()
    assert y.isnan().all()
    assert z.tolist() == [3, 3, 3]


def test_another_pool_spoils_nothing(tape):
    x = torch.ones(3)
    (first, y), (second, _) = (
        capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: x * 2) for _ in range(2)
    )
    first.replay()
    second.replay()
    assert y.tolist() == [2, 2, 2]


def test_a_view_of_a_result_follows_it(record):
    x = torch.ones(4)
    graph, view = record(lambda: (x + 1).view(2, 2).t()[0])
    graph.replay()
    assert view.tolist() == [2, 2]


def test_a_custom_op_is_recorded_as_the_ops_inside_it(record):
    @torch.library.custom_op("tape_test::shift", mutates_args=("out",))
    def shift(x: torch.Tensor, out: torch.Tensor, by: float) -> torch.Tensor:
        calls.append(by)
        out.copy_(x + by)
        return x * by

    calls = []
    x = torch.ones(3)
    out = torch.zeros(3)
    graph, y = record(lambda: torch.ops.tape_test.shift(x, out, 2.0) + 0)
    x.fill_(5)
    graph.replay()
    assert (out.tolist(), y.tolist(), calls) == ([7, 7, 7], [10, 10, 10], [2.0])


def test_a_transfer_between_processes_is_called_again(record):
    """What moves the data is no op, so a record of the ops inside would leave it out."""

    @torch.library.custom_op("transfers::tape_test", mutates_args=("out",))
    def move(x: torch.Tensor, out: torch.Tensor) -> None:
        out.numpy()[:] = x.numpy() + len(calls)
        calls.append(None)

    calls = []
    x, out = torch.ones(3), torch.zeros(3)
    graph, y = record(lambda: (torch.ops.transfers.tape_test(x, out), out + 0)[1])
    assert out.tolist() == [0, 0, 0], "a capture computes nothing"
    x.fill_(5)
    graph.replay()
    assert (out.tolist(), y.tolist(), len(calls)) == ([6, 6, 6], [6, 6, 6], 2)


def test_a_break_inside_a_custom_op_is_refused(tape):
    @torch.library.custom_op("tape_test::broken", mutates_args=("out",))
    def broken(x: torch.Tensor, out: torch.Tensor) -> None:
        eager_break_during_capture(lambda: None)()

    with (
        pytest.raises(CaptureError, match=r"tape_test\.broken.*outermost"),
        BreakableCUDAGraphCapture(tape.new_pool()),
    ):
        torch.ops.tape_test.broken(torch.ones(1), torch.ones(1))


def test_constants_made_from_python_numbers_survive(record):
    x = torch.ones(3)
    graph, y = record(
        lambda: (
            x * torch.tensor(3.0) + torch.where(x > 0, 1.5, x) + torch.maximum(x, torch.tensor(2))
        )
    )
    graph.replay()
    assert y.tolist() == [6.5, 6.5, 6.5]


def test_an_input_that_died_is_named_at_replay(record):
    static = [torch.ones(3)]
    graph, _ = record(lambda: static[0].mul(2))
    static.clear()
    with pytest.raises(CaptureError, match=r"an input of aten\.mul.*static buffers"):
        graph.replay()


def test_a_graph_without_work_is_none(record):
    x = torch.ones(4)
    assert record(lambda: torch.empty_like(x).view(2, 2))[0] is None


def test_memory_is_counted_and_given_back(tape):
    pool = tape.new_pool()
    x = torch.ones(1024)
    free = tape.free_memory()
    graph, output = capture_graph(pool, BatchDescriptor(1), lambda: x + 1)
    assert free - tape.free_memory() == 4096
    assert pool.pinned_bytes() == 4096
    del output
    assert pool.pinned_bytes() == 0
    graph.reset()
    assert tape.free_memory() == free


def test_replay_is_not_slower_than_twice_eager():
    x = torch.randn(16, 64)
    y = torch.zeros(16, 64)
    w = [torch.randn(64, 64) for _ in range(8)]

    def forward():
        h = x
        for weight in w:
            h = torch.nn.functional.silu(h @ weight) + h * torch.rsqrt(
                h.pow(2).mean(-1, keepdim=True) + 1e-6
            )
        y.copy_(h)

    graph, _ = capture_graph(TapeBackend().new_pool(), BatchDescriptor(1), forward)
    replay, eager = _best_of_each(graph.replay, forward)
    assert replay < 2 * eager


def _best_of_each(*functions, tries=60, calls=5):
    """In turn, so that other load on the machine meets all of them."""

    def once(function):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - began

    rounds = [[once(function) for function in functions] for _ in range(tries)]
    return map(min, zip(*rounds, strict=True))


def test_a_failed_capture_keeps_no_memory(tape, record):
    free = tape.free_memory()
    x = torch.ones(1024)
    with pytest.raises(CaptureError):
        record(lambda: (x + 1).tolist())
    assert tape.free_memory() == free
