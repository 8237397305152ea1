import threading

import pytest
import torch

from graphs.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from graphs.modes import CUDAGraphMode
from graphs.protocol import CaptureError


@pytest.fixture
def pool(backend):
    return backend.new_pool()


@eager_break_during_capture
def double(x, out):
    out.copy_(x * 2)


@pytest.fixture
def captured(pool, device, warm):
    """(x, y, capture) of y = double(x + 1) + 1."""
    x, middle, y = (torch.zeros(4, device=device) for _ in range(3))

    def forward():
        shifted = x + 1
        double(shifted, middle)
        torch.add(middle, 1, out=y)

    warm(forward)
    with BreakableCUDAGraphCapture(pool) as capture:
        forward()
    return x, y, capture


def test_replay_runs_graphs_and_eager_calls_in_order(captured):
    x, y, capture = captured
    for value in (3, 5):
        x.fill_(value)
        capture.replay()
        assert y.tolist() == [2 * (value + 1) + 1] * 4


def test_a_capture_counts_its_parts(captured):
    capture = captured[2]
    assert (capture.num_graphs, capture.num_eager_breaks) == (2, 1)
    assert repr(capture) == "<BreakableCUDAGraphCapture closed: 2 graphs, 1 eager breaks>"


def test_a_capture_is_active_only_inside_its_body(pool):
    assert not BreakableCUDAGraphCapture.is_active()
    with BreakableCUDAGraphCapture(pool) as capture:
        assert BreakableCUDAGraphCapture.current() is capture
        assert "recording" in repr(capture)
    assert BreakableCUDAGraphCapture.current() is None


def test_breaks_first_last_and_adjacent_make_no_empty_graphs(pool, device, warm):
    x, a, b, y = (torch.ones(2, device=device) for _ in range(4))

    def forward():
        double(x, a)
        double(a, b)
        torch.add(b, 1, out=y)
        double(y, a)

    warm(forward)
    with BreakableCUDAGraphCapture(pool) as capture:
        forward()
    assert (capture.num_graphs, capture.num_eager_breaks) == (1, 3)
    x.fill_(3)
    capture.replay()
    assert a.tolist() == [26, 26]


def test_a_break_inside_an_eager_segment_just_runs(pool, device):
    x = torch.ones(2, device=device)
    y = torch.zeros(2, device=device)

    @eager_break_during_capture
    def outer(x, out):
        double(x, out)

    with BreakableCUDAGraphCapture(pool) as capture:
        outer(x, y)
    assert capture.num_eager_breaks == 1


def test_outside_a_capture_the_decorated_function_is_plain(device):
    y = torch.zeros(2, device=device)
    double(torch.ones(2, device=device), y)
    assert y.tolist() == [2, 2]
    assert double.__name__ == "double"


def test_a_capture_is_entered_once(captured, pool):
    x, y, capture = captured
    with pytest.raises(CaptureError, match="was entered before"), capture:
        torch.add(x, 100, out=y)
    capture.replay()
    assert y.tolist() == [3] * 4
    dropped = BreakableCUDAGraphCapture(pool)
    with pytest.raises(KeyError), dropped:
        raise KeyError
    with pytest.raises(CaptureError, match="was entered before"), dropped:
        pass
    assert not BreakableCUDAGraphCapture.is_active()


def test_in_mode_full_a_break_is_captured_like_any_op(pool, device, in_context, warm):
    x = torch.ones(2, device=device)
    y = torch.zeros(2, device=device)
    warm(lambda: double(x, y))
    with in_context(CUDAGraphMode.FULL), BreakableCUDAGraphCapture(pool) as capture:
        double(x, y)
    assert (capture.num_graphs, capture.num_eager_breaks) == (1, 0)


def test_add_eager_returns_what_the_call_returned(pool):
    with BreakableCUDAGraphCapture(pool) as capture:
        assert capture.add_eager(lambda: "at capture") == "at capture"
    assert capture.replay() is None


def test_another_thread_does_not_see_the_capture(pool):
    seen = []
    with BreakableCUDAGraphCapture(pool):
        thread = threading.Thread(target=lambda: seen.append(BreakableCUDAGraphCapture.is_active()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_nesting_is_an_error_and_the_outer_capture_is_dropped(pool):
    with pytest.raises(RuntimeError, match="do not nest"), BreakableCUDAGraphCapture(pool):  # noqa: SIM117
        with BreakableCUDAGraphCapture(pool):
            pass
    assert not BreakableCUDAGraphCapture.is_active()
    with BreakableCUDAGraphCapture(pool):
        pass


@pytest.mark.parametrize("place", ["graph", "break"])
def test_the_first_error_surfaces_and_the_pool_captures_again(pool, device, warm, place):
    x = torch.ones(2, device=device)
    y = torch.zeros(2, device=device)

    @eager_break_during_capture
    def fail_in_break(x):
        raise KeyError("the first error")

    def forward():
        torch.add(x, 1, out=y)
        fail_in_break(x)

    def fail_in_graph():
        torch.add(x, 1, out=y)
        raise KeyError("the first error")

    warm(lambda: torch.add(x, 1, out=y))
    capture = BreakableCUDAGraphCapture(pool)
    with pytest.raises(KeyError, match="the first error"), capture:
        (forward if place == "break" else fail_in_graph)()
    assert not BreakableCUDAGraphCapture.is_active()
    assert capture.num_graphs == 0

    with BreakableCUDAGraphCapture(pool) as again:
        torch.add(x, 1, out=y)
    again.replay()
    assert y.tolist() == [2, 2]


def test_a_break_may_not_return_a_tensor_of_its_own(pool, device):
    @eager_break_during_capture
    def own_tensor(x):
        return x * 2

    with (
        pytest.raises(CaptureError, match="own_tensor returned a tensor of its own"),
        BreakableCUDAGraphCapture(pool),
    ):
        own_tensor(torch.ones(2, device=device))


def test_a_break_may_return_what_it_was_given(pool, device):
    @eager_break_during_capture
    def into(x, out):
        return [out.copy_(x)]

    y = torch.zeros(2, device=device)
    with BreakableCUDAGraphCapture(pool):
        assert into(torch.ones(2, device=device), out=y)[0].data_ptr() == y.data_ptr()


def test_tensors_of_a_break_are_not_pinned_even_in_nested_lists_and_by_keyword(tape):
    pool = tape.new_pool()
    x = torch.ones(2)
    y = torch.zeros(2)

    @eager_break_during_capture
    def gather(parts, out, *, scale):
        out.copy_((parts[0][0] + parts[1]["b"]) * scale["by"])

    with BreakableCUDAGraphCapture(pool) as capture:
        gather([[x + 1], {"b": x + 2}], y, scale={"by": x + 3})
    assert pool.num_bytes() > 0
    assert pool.pinned_bytes() == 0
    x.fill_(10)
    capture.replay()
    assert y.tolist() == [23 * 13, 23 * 13]


def test_two_captures_of_a_pool_do_not_disturb_each_others_static_buffers(pool, device, warm):
    x, y, z = (torch.ones(2, device=device) for _ in range(3))
    warm(lambda: torch.add(x * 3, 1, out=y))
    with BreakableCUDAGraphCapture(pool) as first:
        torch.add(x * 3, 1, out=y)
    with BreakableCUDAGraphCapture(pool) as second:
        torch.add(x * 5, 1, out=z)
    for capture in (first, second, first):
        capture.replay()
    assert (y.tolist(), z.tolist()) == ([4, 4], [6, 6])
