import re

import pytest
import torch

from graphs.capturing import set_cudagraph_capturing_enabled
from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import CaptureError, GraphHooks
from graphs.wrapper import BreakableCUDAGraphWrapper, CUDAGraphOptions, CUDAGraphWrapper

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Counted:
    """A callable that counts its calls in Python."""

    label = "counted"

    def __init__(self):
        self.num_calls = 0

    def __call__(self, x, *, bias=None):
        self.num_calls += 1
        return x * 2 if bias is None else x * 2 + bias


@pytest.fixture(params=["full", "breakable"])
def wrapper(request, backend):
    pool = backend.new_pool()
    call = Counted()
    return (
        CUDAGraphWrapper(call, PIECEWISE, pool)
        if request.param == "full"
        else BreakableCUDAGraphWrapper(call, pool)
    )


@pytest.fixture
def x(device, warm):
    x = torch.ones(8, device=device)
    warm(lambda: x * 2 + x)
    return x


def test_without_a_context_or_with_another_mode_the_callable_runs(wrapper, x, in_context):
    assert wrapper(x).tolist() == [2] * 8
    for mode in (NONE, FULL):
        with in_context(mode):
            wrapper(x)
    assert wrapper.unwrap().num_calls == 3
    assert not wrapper.entries


def test_a_new_descriptor_captures_and_a_known_one_replays(wrapper, x, in_context):
    for num_tokens in (4, 8):
        with in_context(PIECEWISE, num_tokens):
            wrapper(x[:num_tokens])
    x.fill_(5)
    for num_tokens in (8, 4):
        with in_context(PIECEWISE, num_tokens):
            assert wrapper(x[:num_tokens]).tolist() == [10] * num_tokens
    assert wrapper.unwrap().num_calls == 2


def test_hooks_of_the_pool_wait_before_each_replay_and_join_each_capture(wrapper, x, in_context):
    calls = []

    class Hooks(GraphHooks):
        def synchronize(self):
            calls.append("synchronize")

        def join(self):
            calls.append("join")

    wrapper._pool.hooks = Hooks()
    for _ in range(2):
        with in_context(PIECEWISE):
            wrapper(x)
    assert calls == ["synchronize", "join", "synchronize"]


def test_attributes_fall_through_to_the_callable(wrapper):
    assert wrapper.label == "counted"
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapper.no_such


def test_cleared_graphs_are_captured_again(wrapper, x, in_context):
    with in_context(PIECEWISE):
        wrapper(x)
        wrapper.clear_graphs()
        wrapper(x)
        assert wrapper(x).tolist() == [2] * 8
    assert wrapper.unwrap().num_calls == 2


def test_a_mode_without_a_descriptor_is_an_error(wrapper, x):
    context = ForwardContext(
        attn_metadata=None, slot_mapping=None, num_tokens=8, runtime_mode=PIECEWISE
    )
    with set_forward_context(context), pytest.raises(ValueError, match="needs a batch_descriptor"):
        wrapper(x)


def test_nothing_is_captured_once_serving_began(wrapper, x, in_context):
    with in_context(PIECEWISE, 4):
        wrapper(x[:4])
    set_cudagraph_capturing_enabled(wrapper._pool, False)
    with in_context(PIECEWISE, 4):
        assert wrapper(x[:4]).tolist() == [2] * 4
    with (
        in_context(PIECEWISE, 8),
        pytest.raises(CaptureError, match="capture ended when serving began"),
    ):
        wrapper(x)


@pytest.mark.parametrize("what", ["args", "bias", "attn_metadata", "slot_mapping"])
def test_with_debugging_a_changed_address_is_named(monkeypatch, backend, x, in_context, what):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    wrapper = BreakableCUDAGraphWrapper(Counted(), backend.new_pool())
    given = {"args": x, "bias": x.clone(), "attn_metadata": x.clone(), "slot_mapping": x.clone()}

    def call():
        with in_context(PIECEWISE, slots=given["slot_mapping"], lengths=[given["attn_metadata"]]):
            wrapper(given["args"], bias=given["bias"])

    call()
    call()
    old = given[what]
    given[what] = old.clone()
    with pytest.raises(CaptureError, match=rf"{what}.*{hex(old.data_ptr())} at capture"):
        call()


def test_a_wrapper_has_one_runtime_mode(tape):
    with pytest.raises(ValueError, match="FULL or for PIECEWISE"):
        CUDAGraphWrapper(Counted(), NONE, tape.new_pool())


def test_a_full_wrapper_around_a_piecewise_one_captures_once(backend, x, in_context):
    pool = backend.new_pool()
    inner = CUDAGraphWrapper(Counted(), PIECEWISE, pool)
    outer = CUDAGraphWrapper(inner, FULL, pool)
    for mode in (FULL, PIECEWISE, FULL, PIECEWISE):
        with in_context(mode):
            outer(x)
    assert inner.unwrap().num_calls == 2
    assert len(inner.entries) == len(outer.entries) == 1


def test_outputs_keep_their_structure_and_pin_nothing(tape, in_context):
    pool = tape.new_pool()
    wrapper = CUDAGraphWrapper(lambda x: {"y": [x + 1, (x + 2, "text")]}, FULL, pool)
    with in_context(FULL):
        wrapper(torch.zeros(2))
    assert pool.num_bytes() == 16
    assert pool.pinned_bytes() == 0


def test_a_piece_that_is_not_the_last_returns_a_strong_output_at_capture(tape, in_context):
    pool = tape.new_pool()
    first = CUDAGraphWrapper(
        lambda x: x + 1, PIECEWISE, pool, CUDAGraphOptions(weak_ref_output=False)
    )
    x = torch.zeros(2)
    with in_context(PIECEWISE):
        output = first(x)
        assert pool.pinned_bytes() == 8
        del output
        assert pool.pinned_bytes() == 0
        assert first.entries[BatchDescriptor(4)].output.shape == (2,)


@pytest.mark.parametrize("is_logged", [True, False])
@pytest.mark.parametrize("kind", ["full", "breakable"])
def test_each_capture_is_one_debug_line_unless_told_otherwise(
    backend, x, in_context, caplog, kind, is_logged
):
    caplog.set_level("DEBUG", logger="graphs")
    if kind == "full":
        options = None if is_logged else CUDAGraphOptions(debug_log_enable=False)
        wrapper = CUDAGraphWrapper(Counted(), PIECEWISE, backend.new_pool(), options)
    else:
        wrapper = BreakableCUDAGraphWrapper(
            Counted(), backend.new_pool(), debug_log_enable=is_logged
        )
    for _ in range(2):
        with in_context(PIECEWISE):
            wrapper(x)
    lines = [record.getMessage() for record in caplog.records if record.name == "graphs"]
    assert len(lines) == is_logged
    key = re.escape(str(BatchDescriptor(4)))
    wanted = rf"captured .*Counted.*, PIECEWISE, {key}: 1 segments, [1-9]\d* bytes"
    assert all(re.fullmatch(wanted, line) for line in lines)


@pytest.mark.parametrize("is_weak", [True, False])
def test_the_output_of_a_capture_pins_its_memory_only_where_a_later_piece_reads_it(
    tape, in_context, is_weak
):
    pool = tape.new_pool()
    x = torch.ones(8)
    wrapper = CUDAGraphWrapper(
        Counted(), PIECEWISE, pool, CUDAGraphOptions(weak_ref_output=is_weak)
    )
    with in_context(PIECEWISE):
        output = wrapper(x)
    assert output.shape == x.shape
    assert (pool.pinned_bytes() == 0) == is_weak
    assert pool.num_bytes() > 0
