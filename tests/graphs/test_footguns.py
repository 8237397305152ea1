"""The surprises of capture, one test and one sentence each. Read it before capturing anything."""

import pytest
import torch

from graphs.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from graphs.capturing import set_cudagraph_capturing_enabled
from graphs.context import get_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import CaptureError
from graphs.wrapper import BreakableCUDAGraphWrapper, CUDAGraphWrapper, capture_graph

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.fixture
def buffers(device):
    """x, y: static buffers of two rows."""
    return torch.ones(2, device=device), torch.zeros(2, device=device)


@pytest.fixture
def capture(backend, warm):
    """capture(fn) warms up and captures fn on one pool; returns its graph and its output."""
    pool = backend.new_pool()
    owners = iter(range(1, 100))

    def run(fn):
        warm(fn)
        return capture_graph(pool, BatchDescriptor(next(owners)), fn)

    return run


def test_a_number_is_frozen(capture, buffers):
    """A Python number is read once, at capture."""
    x, y = buffers
    scale = [2.0]
    graph, _ = capture(lambda: torch.mul(x, scale[0], out=y))
    scale[0] = 100.0
    graph.replay()
    assert y.tolist() == [2, 2]


def test_a_branch_is_frozen(capture, buffers):
    """A Python branch is taken once, at capture."""
    x, y = buffers
    is_long = [False]
    graph, _ = capture(lambda: torch.mul(x, 100 if is_long[0] else 2, out=y))
    is_long[0] = True
    graph.replay()
    assert y.tolist() == [2, 2]


def test_host_effects_happen_at_capture_only(capture, buffers):
    """Python runs at warm-up and at capture; a replay appends, counts and logs nothing."""
    x, y = buffers
    calls = []
    graph, _ = capture(lambda: (calls.append(1), torch.mul(x, 2, out=y)))
    graph.replay()
    assert len(calls) == 2


def test_a_capture_computes_nothing(capture, buffers):
    """Buffers are as they were after a capture: the first results come from the first replay."""
    x, y = buffers

    def forward():
        torch.add(y, x, out=y)

    graph, _ = capture(forward)
    assert y.tolist() == [1, 1]  # from the warm-up
    graph.replay()
    assert y.tolist() == [2, 2]


def test_a_new_tensor_under_an_old_name_is_not_read(capture, buffers):
    """A graph knows addresses, not names: copy into the static buffer, never replace it."""
    x, y = buffers
    inputs = {"x": x}
    graph, _ = capture(lambda: torch.mul(inputs["x"], 2, out=y))
    inputs["x"] = torch.full_like(x, 100)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_debugging_names_the_argument_whose_address_changed(
    monkeypatch, backend, buffers, warm, in_context
):
    """With SPECDEC_DEBUG=1 a wrapper compares addresses with those of its capture."""
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    x, _ = buffers
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, backend.new_pool())
    warm(lambda: x * 2)
    with in_context(FULL):
        wrapper(x)
        with pytest.raises(CaptureError, match=r"args\[0\]: 0x.* at capture"):
            wrapper(x.clone())


def test_an_output_lives_until_the_next_replay(capture, buffers):
    """Graphs of one pool share memory: copy an output before another graph replays."""
    x, _ = buffers
    first, y = capture(lambda: x * 2)
    second, z = capture(lambda: x * 3)
    first.replay()
    kept = y.clone()
    second.replay()
    assert kept.tolist() == [2, 2]
    assert z.tolist() == [3, 3]


def test_an_output_used_after_another_replay_is_garbage(tape):
    """On the tape the memory that another replay took is NaN; on CUDA it holds other numbers."""
    pool = tape.new_pool()
    x = torch.ones(2)
    first, y = capture_graph(pool, BatchDescriptor(1), lambda: x * 2)
    second, _ = capture_graph(pool, BatchDescriptor(2), lambda: x * 3)
    first.replay()
    second.replay()
    assert y.isnan().all()


def test_padding_is_computed_too(capture, device):
    """A graph always runs its full size: the padding of a buffer is read like any row."""
    x = torch.ones(4, device=device)
    total = torch.zeros((), device=device)
    graph, _ = capture(lambda: torch.sum(x, dim=0, out=total))
    x[2:] = float("nan")
    graph.replay()
    assert total.isnan()
    x[2:] = 0
    graph.replay()
    assert total == 2


def _attention(x, out):
    out.copy_(x * get_forward_context().attn_metadata["length"])


@pytest.mark.parametrize("is_break, expected", [(True, [9, 9]), (False, [2, 2])])
def test_live_metadata_is_read_live_only_in_a_break(
    backend, buffers, warm, in_context, is_break, expected
):
    """The classic corruption: attention that is no break keeps the metadata of its capture."""
    x, y = buffers
    attention = eager_break_during_capture(_attention) if is_break else _attention
    wrapper = BreakableCUDAGraphWrapper(lambda: attention(x, y), backend.new_pool())
    with in_context(PIECEWISE, length=2):
        warm(lambda: _attention(x, y))
        wrapper()
    with in_context(PIECEWISE, length=9):
        wrapper()
    assert y.tolist() == expected


def test_the_context_is_needed_at_replay_too(backend, buffers, in_context):
    """Eager breaks read the forward context when they run: a replay needs it as a forward does."""
    x, y = buffers
    with in_context(PIECEWISE, length=2), BreakableCUDAGraphCapture(backend.new_pool()) as capture:
        eager_break_during_capture(_attention)(x, y)
    with pytest.raises(RuntimeError, match="set_forward_context"):
        capture.replay()


def test_a_host_read_cannot_be_captured(tape):
    """Nothing in a graph waits for the device: no .item(), bool of a tensor, shape from data."""
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="item reads the device from the host"):
        capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: x * x.sum().item())


def test_a_host_read_fails_and_the_pool_captures_again(backend, buffers, warm):
    """An error in a capture surfaces as itself; stream, pool and thread can capture again."""
    x, y = buffers
    pool = backend.new_pool()
    warm(lambda: torch.mul(x, x.sum().item(), out=y))
    with pytest.raises(RuntimeError, match=r"item|captur"):
        capture_graph(pool, BatchDescriptor(1), lambda: torch.mul(x, x.sum().item(), out=y))
    graph, _ = capture_graph(pool, BatchDescriptor(1), lambda: torch.mul(x, 5, out=y))
    graph.replay()
    assert y.tolist() == [5, 5]


def test_a_tensor_made_in_a_break_has_no_address(tape):
    """A graph may not read what a break allocated: at the next replay it is elsewhere, or gone."""
    x = torch.ones(2)
    y = torch.zeros(2)
    made = {}

    @eager_break_during_capture
    def make():
        made["it"] = torch.full((2,), 3.0)

    with BreakableCUDAGraphCapture(tape.new_pool()) as capture:
        make()
        torch.mul(x, made["it"], out=y)
    with pytest.raises(CaptureError, match="freed after the capture"):
        capture.replay()


def test_a_strong_reference_pins_memory(tape):
    """A strong reference to a captured tensor keeps its memory from other sizes."""
    pool = tape.new_pool()
    x = torch.zeros(256)
    kept = []
    capture_graph(pool, BatchDescriptor(256), lambda: kept.append(x + 1))
    assert pool.pinned_bytes() == 1024
    kept.clear()
    assert pool.pinned_bytes() == 0


def test_captures_do_not_nest(backend):
    """A thread captures one thing at a time."""
    pool = backend.new_pool()
    with pytest.raises(RuntimeError, match="do not nest"), BreakableCUDAGraphCapture(pool):
        capture_graph(pool, BatchDescriptor(1), lambda: None)


def test_no_capture_after_serving_began(backend, buffers, in_context):
    """A capture takes a second and new memory: an unexpected one while serving is an error."""
    x, _ = buffers
    pool = backend.new_pool()
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, pool)
    set_cudagraph_capturing_enabled(pool, False)
    with in_context(FULL), pytest.raises(CaptureError, match="capture ended when serving began"):
        wrapper(x)


def test_torchs_random_numbers_are_not_captured(tape):
    """Noise comes from counters in device memory; torch's generator lives on the host."""
    with pytest.raises(CaptureError, match="draws from torch's generator"):
        capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: torch.rand(2))


def test_a_static_buffer_that_was_freed_is_named(tape):
    """A graph keeps no input alive; on CUDA it would read whatever lies at the address now."""
    static = {"x": torch.ones(2)}
    graph, _ = capture_graph(tape.new_pool(), BatchDescriptor(1), lambda: static["x"] * 2)
    static.clear()
    with pytest.raises(CaptureError, match="captured inputs are static buffers"):
        graph.replay()
