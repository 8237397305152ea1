import itertools
import json
from dataclasses import replace

import pytest
import torch

from graphs.breakable import BreakableCUDAGraphCapture
from graphs.context import ForwardContext, get_forward_context, set_forward_context
from graphs.counters import GraphCounters, summary
from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import CaptureError, GraphHooks
from graphs.sizes import CaptureSizes, capture_sizes
from graphs.tape.backend import TapeBackend

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, FULL_DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
MAX_TOKENS = 48


class Family:
    """A manager of the toy model, with static buffers and make_forward as an engine has them."""

    def __init__(
        self, model, backend, device, mode, sizes, query_len=2, use_breakable_cg=True, **options
    ):
        self.model = model
        self.prepared = []
        self.num_runs = 0
        self.x = torch.zeros(MAX_TOKENS + 3, 8, device=device)
        self.out = torch.zeros(MAX_TOKENS + 3, 8, device=device)
        self.scale = torch.ones(MAX_TOKENS + 3, 1, device=device)
        self.manager = CudaGraphManager(
            "toy",
            sizes,
            mode,
            query_len,
            backend,
            outputs=(self.out,),
            use_breakable_cg=use_breakable_cg,
            **options,
        )
        self.use_breakable_cg = use_breakable_cg
        self.init_runner(model)

    def init_runner(self, model):
        if self.use_breakable_cg:
            self.manager.init_breakable_cg_runner(model)
        else:
            self.manager.init_compiled_runner(model, ["toy::scale_rows"])

    def capture(self, **kwargs):
        self.manager.capture(self.make_forward, **kwargs)

    def make_forward(self, desc, warmup):
        self.prepared.append((desc, warmup))
        mode = NONE if warmup else FULL if desc.num_reqs else PIECEWISE
        return lambda: self.forward(mode, desc)

    def forward(self, mode, desc):
        self.num_runs += 1
        n = desc.num_tokens
        metadata = {"scale": self.scale[:n]}
        context = ForwardContext(
            attn_metadata=metadata,
            slot_mapping=None,
            num_tokens=n,
            runtime_mode=mode,
            batch_descriptor=desc,
        )
        with set_forward_context(context):
            return self.manager.run_pw_graph(
                self.model, {"x_TD": self.x[:n], "out_TD": self.out[:n]}
            )

    def step(self, num_reqs, num_tokens, query_len=None, **dispatched):
        """Run a batch on fresh inputs; padding holds NaN, so a row that reads it is seen."""
        self.x[:num_tokens].normal_()
        self.scale[:num_tokens].normal_()
        for buffer in (self.x, self.scale):
            buffer[num_tokens:] = float("nan")
        self.out.fill_(float("nan"))
        chosen = self.manager.dispatch(num_reqs, num_tokens, query_len, **dispatched)
        if chosen.mode is FULL:
            (rows,) = self.manager.run_fullgraph(chosen.descriptor)
            assert rows.shape[0] == chosen.descriptor.num_tokens
        else:
            self.forward(chosen.mode, chosen.descriptor)
        return chosen, self.out[:num_tokens].clone(), self.eager(num_tokens)

    def eager(self, n):
        expected = torch.zeros_like(self.out[:n])
        context = ForwardContext(
            attn_metadata={"scale": self.scale[:n]}, slot_mapping=None, num_tokens=n
        )
        with set_forward_context(context):
            self.model(self.x[:n], expected)
        return expected


@pytest.fixture
def family(toy, backend, device):
    def make(mode, max_num_reqs=8, query_len=2, **kwargs):
        sizes = capture_sizes(
            max_num_reqs,
            MAX_TOKENS,
            **{k: kwargs.pop(k) for k in ("requests", "tokens") if k in kwargs},
        )
        return Family(toy, backend, device, mode, sizes, query_len, **kwargs)

    return make


@pytest.mark.parametrize("use_breakable_cg", [True, False])
def test_replay_equals_eager_over_shrinking_and_growing_batches(family, use_breakable_cg):
    toy = family(
        BOTH, max_num_reqs=24, use_breakable_cg=use_breakable_cg, tokens=[1, 2, 4, 16, 32, 48]
    )
    toy.capture()
    for num_reqs in (24, 12, 23, 1, 17, 2):
        for query_len in (2, None):
            chosen, rows, expected = toy.step(num_reqs, num_reqs * 2, query_len)
            assert chosen.mode is (FULL if query_len else PIECEWISE)
            torch.testing.assert_close(rows, expected)
    assert toy.manager.counters.replays == {FULL: 6, PIECEWISE: 6}


def test_ragged_batches_replay_whole_if_they_are_of_the_kind(toy, backend, device):
    of = BatchDescriptor
    further = of(3, 2, kind="toy"), of(6, 4, kind="toy"), of(10, 4, kind="toy")
    sizes = CaptureSizes(requests=(4,), tokens=(16,), further=further)
    family = Family(toy, backend, device, BOTH, sizes)
    family.capture()
    for num_reqs, num_tokens, desc in zip((4, 3, 1), (9, 3, 3), reversed(further), strict=True):
        chosen, rows, expected = family.step(num_reqs, num_tokens, kind="toy")
        assert (chosen.mode, chosen.descriptor) == (FULL, desc)
        torch.testing.assert_close(rows, expected)
    chosen, rows, expected = family.step(3, 3)
    assert chosen.mode is PIECEWISE
    torch.testing.assert_close(rows, expected)
    assert family.manager.counters.replays == {FULL: 3, PIECEWISE: 1}
    assert not family.manager.needs_capture()


def test_the_first_forward_of_a_size_is_eager_and_the_second_is_captured(family):
    toy = family(BOTH, requests=[1, 2], tokens=[4, 8])
    toy.capture()
    full = [BatchDescriptor(n * 2, n, 2) for n in (2, 1)]
    pieces = [BatchDescriptor(8), BatchDescriptor(4)]
    assert toy.prepared == [(desc, warmup) for desc in pieces + full for warmup in (True, False)]
    assert toy.num_runs == 8
    assert not toy.manager.needs_capture()
    toy.capture()
    assert toy.num_runs == 8


def test_records_and_counters_tell_what_was_captured_and_run(family):
    toy = family(BOTH, requests=[2], tokens=[8])
    toy.capture()
    counters = toy.manager.counters
    assert [(r.mode, r.descriptor, r.num_graphs) for r in counters.captures] == [
        (PIECEWISE, BatchDescriptor(8), 4),
        (FULL, BatchDescriptor(4, 2, 2), 1),
    ]
    assert counters.num_graphs == 5
    assert counters.seconds > 0
    toy.step(1, 5)
    toy.step(1, 2, 2)
    toy.step(1, 40)
    assert counters.dispatches == {PIECEWISE: 1, FULL: 1, NONE: 1}
    assert counters.replays == {PIECEWISE: 1, FULL: 1}
    assert counters.padded_tokens == 3 + 2
    assert counters.batches == {(PIECEWISE, 5, 8): 1, (FULL, 2, 4): 1, (NONE, 40, 40): 1}


@pytest.mark.parametrize("use_breakable_cg", [True, False])
def test_each_capture_of_a_family_is_one_debug_line(family, caplog, use_breakable_cg):
    caplog.set_level("DEBUG", logger="graphs")
    toy = family(BOTH, requests=[2], tokens=[8], use_breakable_cg=use_breakable_cg)
    toy.capture()
    of_pieces, of_full = (record.num_bytes for record in toy.manager.counters.captures)
    assert [record.getMessage() for record in caplog.records if record.name == "graphs"] == [
        f"captured toy, PIECEWISE, {BatchDescriptor(8)}: 4 segments, {of_pieces} bytes",
        f"captured toy, FULL, {BatchDescriptor(4, 2, 2)}: 1 segments, {of_full} bytes",
    ]


def test_counters_are_kept_by_size_and_mode_and_say_so_in_json_and_in_words(family):
    toy = family(BOTH, requests=[2], tokens=[8])
    toy.capture()
    for num_reqs, num_tokens, query_len in [(1, 5, None), (1, 2, 2), (1, 2, 2), (1, 40, None)]:
        toy.step(num_reqs, num_tokens, query_len)
    counters = toy.manager.counters
    names = ("mode", "unpadded_tokens", "num_tokens", "batches", "padded_tokens")
    rows = [("FULL", 2, 4, 2, 4), ("NONE", 40, 40, 1, 0), ("PIECEWISE", 5, 8, 1, 3)]
    assert counters.rows() == [dict(zip(names, row, strict=True)) for row in rows]
    told = json.loads(json.dumps(counters.as_dict()))
    assert told["batches"] == counters.rows()
    assert (told["replays"], told["padded_tokens"], told["num_graphs"]) == (
        {"PIECEWISE": 1, "FULL": 2},
        7,
        5,
    )
    told = summary({"toy": counters, "idle": GraphCounters()})
    assert told == "toy PIECEWISE 1, FULL 2, NONE 1, 12.5% padding"


def test_without_a_backend_or_a_mode_everything_is_eager(toy, device, backend):
    for mode, given in ((BOTH, None), (NONE, backend)):
        family = Family(toy, given, device, mode, capture_sizes(4, 8))
        assert not family.manager.needs_capture()
        family.capture()
        chosen, rows, expected = family.step(2, 4, 2)
        assert (chosen.mode, chosen.descriptor) == (NONE, BatchDescriptor(4, 2, 2))
        torch.testing.assert_close(rows, expected)
    assert family.num_runs == 1


@pytest.mark.parametrize("given", [None, "tape"])
def test_full_graphs_of_ragged_batches_are_refused_by_name(tape, given):
    with pytest.raises(ValueError, match="mixed: mode=FULL asks for full graphs of ragged batches"):
        CudaGraphManager("mixed", capture_sizes(1, 4), FULL, 1, tape if given else None)


@pytest.mark.parametrize(
    "mode, uniform, ragged", [(FULL_DECODE_ONLY, FULL, NONE), (PIECEWISE, PIECEWISE, PIECEWISE)]
)
def test_a_family_runs_in_the_modes_that_it_was_given(family, mode, uniform, ragged):
    toy = family(mode, requests=[1, 2], tokens=[2, 4])
    toy.capture()
    assert toy.step(2, 4, 2)[0].mode is uniform
    assert toy.step(2, 3)[0].mode is ragged


def test_cleared_graphs_are_not_dispatched_and_can_be_captured_again(family):
    toy = family(BOTH, requests=[2], tokens=[8])
    for _ in range(2):
        toy.capture()
        assert toy.step(2, 4, 2)[0].mode is FULL
        toy.manager.clear_graphs()
        assert toy.step(2, 4, 2)[0].mode is NONE
        assert toy.manager.counters.num_graphs == 0


def test_the_measure_of_a_family_is_that_of_its_largest_sizes_and_keeps_nothing(tape, cpu_toy):
    family = Family(cpu_toy, tape, torch.device("cpu"), BOTH, capture_sizes(8, MAX_TOKENS))
    free = tape.free_memory()
    num_bytes = family.manager.measure(family.make_forward)
    assert num_bytes > 0
    assert tape.free_memory() == free
    assert {desc for desc, _ in family.prepared} == {
        BatchDescriptor(48),
        BatchDescriptor(16, 8, 2),
    }
    assert family.manager.needs_capture()


def test_the_bytes_of_a_capture_are_its_own_while_others_use_the_device(cpu_toy, monkeypatch):
    tape = TapeBackend()
    others = itertools.count()
    monkeypatch.setattr(tape, "free_memory", lambda: next(others) << 30)
    family = Family(cpu_toy, tape, torch.device("cpu"), BOTH, capture_sizes(2, 4))
    family.capture()
    sizes = [record.num_bytes for record in family.manager.counters.captures]
    assert min(sizes) > 0
    assert sum(sizes) == family.manager.num_bytes() < 1 << 20
    family.manager.clear_graphs()
    assert family.manager.num_bytes() == 0


def test_kinds_share_memory_and_run_in_turn(toy, backend, device):
    def family(*kinds):
        of = [BatchDescriptor(2 * n, n, 2, kind=kind) for kind in kinds for n in (3, 8)]
        made = Family(
            toy, backend, device, BOTH, CaptureSizes(requests=(), tokens=(16,), further=tuple(of))
        )
        made.capture()
        return made

    alone, both = family("a"), family("a", "b")
    for kind, num_reqs in itertools.product("abab", (8, 2)):
        chosen, ours, expected = both.step(num_reqs, 2 * num_reqs, 2, kind=kind)
        assert (chosen.mode, chosen.descriptor.kind) == (FULL, kind)
        assert torch.equal(ours, expected)
    assert both.step(2, 4, 2, kind="c")[0].mode is PIECEWISE
    if device.type == "cuda":
        assert both.manager.counters.num_bytes < 2 * alone.manager.counters.num_bytes
    assert both.manager.measure(both.make_forward) > 0


def test_captures_pin_no_memory(tape, cpu_toy):
    family = Family(cpu_toy, tape, torch.device("cpu"), BOTH, capture_sizes(8, MAX_TOKENS))
    family.capture()
    assert family.manager.counters.num_bytes > 0
    assert family.manager._pool.pinned_bytes() == 0


def test_a_full_graph_that_was_not_captured_is_an_error(family):
    with pytest.raises(CaptureError, match="toy has no full graph of"):
        family(FULL_DECODE_ONLY).manager.run_fullgraph(BatchDescriptor(2, 1, 2))


def test_after_serving_began_nothing_is_captured(family):
    toy = family(BOTH)
    other = family(BOTH, requests=[2], tokens=[4])
    toy.manager.set_cudagraph_capturing_enabled(False)
    with pytest.raises(CaptureError, match="the toy family would be captured now"):
        toy.capture()
    other.capture()
    assert other.step(2, 4, 2)[0].mode is FULL
    toy.manager.set_cudagraph_capturing_enabled(True)
    toy.capture()
    assert toy.step(2, 4, 2)[0].mode is FULL


def test_a_forward_that_does_not_reach_the_runner_is_an_error(backend):
    manager = CudaGraphManager("lost", capture_sizes(1, 4), PIECEWISE, 1, backend)
    with pytest.raises(CaptureError, match=r"lost: the forward of .* captured nothing"):
        manager.capture(lambda desc, warmup: lambda: None)


def test_the_runner_serves_one_model(family):
    toy = family(BOTH, tokens=[4], requests=[])
    with pytest.raises(CaptureError, match="was built for"):
        toy.manager.run_pw_graph(lambda: None, {})


@pytest.mark.parametrize("use_breakable_cg", [True, False])
def test_a_runner_is_built_once_and_keeps_its_graphs(family, use_breakable_cg):
    toy = family(PIECEWISE, tokens=[4], use_breakable_cg=use_breakable_cg)
    toy.capture()
    toy.init_runner(toy.model)
    chosen, rows, expected = toy.step(2, 3)
    assert chosen.mode is PIECEWISE
    torch.testing.assert_close(rows, expected)
    assert toy.manager.counters.replays == {PIECEWISE: 1}
    with pytest.raises(ValueError, match="toy: its runner was built for"):
        toy.init_runner(torch.nn.Identity())
    if not use_breakable_cg:
        with pytest.raises(
            ValueError, match=r"split at \['toy.scale_rows'\], not at \['toy.other'\]"
        ):
            toy.manager.init_compiled_runner(toy.model, ["toy::other"])


@pytest.mark.parametrize("mode", [NONE, FULL_DECODE_ONLY, PIECEWISE])
def test_in_mode_piecewise_without_a_runner_nothing_runs_eagerly(backend, in_context, mode):
    manager = CudaGraphManager("bare", capture_sizes(1, 4), mode, 1, backend)
    runs = []
    for runtime_mode in (NONE, FULL):
        with in_context(runtime_mode):
            manager.run_pw_graph(lambda: runs.append(1), {})
    with (
        in_context(PIECEWISE),
        pytest.raises(CaptureError, match="bare: run_pw_graph in mode PIECEWISE without a run"),
    ):
        manager.run_pw_graph(lambda: runs.append(1), {})
    assert runs == [1, 1]


@pytest.mark.parametrize("mode", [NONE, FULL_DECODE_ONLY])
def test_a_mode_without_pieces_has_no_runner(toy, backend, mode):
    manager = CudaGraphManager("whole", capture_sizes(1, 4), mode, 1, backend)
    assert not manager.use_breakable_cg
    for model in (toy, torch.nn.Identity()):
        manager.init_breakable_cg_runner(model)
        manager.init_compiled_runner(model, [])
    assert CudaGraphManager("pieces", capture_sizes(1, 4), BOTH, 1, backend).use_breakable_cg


def test_each_implementation_has_its_own_constructor(toy, tape):
    manager = CudaGraphManager(
        "toy", CaptureSizes(requests=(), tokens=(4,)), BOTH, 1, tape, use_breakable_cg=False
    )
    with pytest.raises(ValueError, match="init_compiled_runner"):
        manager.init_breakable_cg_runner(toy)
    manager.use_breakable_cg = True
    with pytest.raises(ValueError, match="init_breakable_cg_runner"):
        manager.init_compiled_runner(toy, [])


@pytest.mark.parametrize("mode", [FULL_DECODE_ONLY, PIECEWISE])
def test_an_error_in_a_capture_leaves_the_family_ready_for_another_try(family, mode):
    toy = family(mode, requests=[1, 2], tokens=[4])
    model = toy.model

    def fail_when_captured(desc, warmup):
        forward = toy.make_forward(desc, warmup)
        model.layers[2].forward = type(model.layers[2]).forward.__get__(model.layers[2])
        if not warmup:
            model.layers[2].forward = _raise
        return forward

    with pytest.raises(KeyError, match="in the middle"):
        toy.manager.capture(fail_when_captured)
    del model.layers[2].forward
    assert toy.step(2, 4, 2)[0].mode is NONE
    assert not BreakableCUDAGraphCapture.is_active()
    toy.capture()
    chosen, rows, expected = toy.step(2, 4, 2)
    assert chosen.mode is mode.decode_mode()
    torch.testing.assert_close(rows, expected)


def _raise(*args):
    raise KeyError("in the middle")


@pytest.mark.parametrize("use_breakable_cg", [True, False])
def test_a_warm_up_that_would_be_captured_is_an_error(family, use_breakable_cg):
    toy = family(PIECEWISE, tokens=[4], use_breakable_cg=use_breakable_cg)
    # what runs first on a stream cannot be captured on CUDA
    with toy.manager._backend.side_stream():
        toy.forward(NONE, BatchDescriptor(4))
    with pytest.raises(
        CaptureError, match=r"toy: the warm-up of .* was captured: with warmup=True"
    ):
        toy.manager.capture(lambda desc, warmup: toy.make_forward(desc, warmup=False))
    assert toy.manager.needs_capture()
    toy.capture()
    assert toy.step(2, 4, 2)[0].mode is PIECEWISE


def test_a_warm_up_is_eager(family, monkeypatch):
    toy = family(PIECEWISE, tokens=[4], requests=[])
    seen = []
    forward = toy.model.forward
    monkeypatch.setattr(
        toy.model,
        "forward",
        lambda **kw: (seen.append(get_forward_context().runtime_mode), forward(**kw))[1],
    )
    toy.capture()
    assert seen == [NONE, PIECEWISE]


def test_batches_with_lora_run_what_was_captured_with_it(family):
    toy = family(BOTH, requests=[2], tokens=[4], specialize_lora=True)
    toy.capture()
    assert {(desc.query_len, desc.has_lora) for desc, _ in toy.prepared} == {
        *((None, True), (None, False), (2, True), (2, False))
    }
    for query_len in (2, None):
        for has_lora in (True, False):
            chosen, rows, expected = toy.step(2, 4, query_len, has_lora=has_lora)
            assert (chosen.mode, chosen.descriptor.has_lora) == (
                FULL if query_len else PIECEWISE,
                has_lora,
            )
            torch.testing.assert_close(rows, expected)
    with pytest.raises(
        ValueError, match="toy has no graphs with LoRA: has_lora=True needs specialize_lora=True"
    ):
        family(BOTH).manager.dispatch(1, 2, 2, has_lora=True)


def test_ranks_that_agreed_on_a_batch_choose_the_same_graph(family):
    toy = family(BOTH, requests=[1, 2, 4], tokens=[4, 8])
    toy.capture()
    for agreed, mode, num_tokens in [
        ((6, 3, 2), FULL, 8),
        ((7, 3, None), PIECEWISE, 8),
        ((30, 9, None), NONE, 30),
    ]:
        batch = BatchDescriptor(*agreed)
        own = [(1, 2, 2), (3, 6, 2)]
        chosen = [toy.manager.dispatch(*each, agreed=batch) for each in own]
        assert chosen[0] == chosen[1]
        assert (chosen[0].mode, chosen[0].descriptor.num_tokens) == (mode, num_tokens)
    chosen, rows, expected = toy.step(1, 2, 2, agreed=BatchDescriptor(6, 3, 2))
    assert chosen.descriptor == BatchDescriptor(8, 4, 2)
    torch.testing.assert_close(rows, expected)
    with pytest.raises(ValueError, match=r"toy: the agreed batch .* does not hold this rank's own"):
        toy.manager.dispatch(3, 6, 2, agreed=BatchDescriptor(4, 2, 2))
    with pytest.raises(ValueError, match="num_reqs=0"):
        toy.manager.dispatch(0, 0, None)


def test_outputs_are_the_rows_of_static_buffers(toy, backend, device):
    first = torch.zeros(8, 3, device=device)
    second = torch.zeros(8, device=device)
    manager = CudaGraphManager(
        "two",
        CaptureSizes(requests=(2, 4), tokens=()),
        FULL_DECODE_ONLY,
        2,
        backend,
        outputs=(first, second),
    )

    def forward(n):
        first[:n] += 1
        second[:n] -= 1

    manager.capture(lambda desc, warmup: lambda: forward(desc.num_tokens))
    for num_reqs in (1, 3):
        first.zero_(), second.zero_()
        desc = manager.dispatch(num_reqs, num_reqs * 2, 2).descriptor
        for _ in range(2):
            rows = manager.run_fullgraph(desc)
        assert [each.data_ptr() for each in rows] == [first.data_ptr(), second.data_ptr()]
        assert [each.shape[0] for each in rows] == [desc.num_tokens] * 2
        assert (rows[0] == 2).all()
        assert (rows[1] == -2).all()
        assert not first[desc.num_tokens :].any()


@pytest.mark.parametrize("mode", [FULL_DECODE_ONLY, PIECEWISE])
def test_hooks_wait_before_captures_and_replays_and_join_inside_the_capture(
    family, device, warm, mode
):
    class Hooks(GraphHooks):
        """Stands for a stream that copies weights: its work must end inside the graph."""

        def __init__(self):
            self.calls = []
            self.joined = torch.zeros(1, device=device)

        def synchronize(self):
            self.calls.append("synchronize")

        def join(self):
            self.calls.append("join")
            self.joined += 1

    hooks = Hooks()
    warm(hooks.join)
    hooks.calls.clear(), hooks.joined.zero_()
    toy = family(mode, requests=[2], tokens=[4], hooks=hooks)
    toy.capture()
    assert hooks.calls == ["synchronize", "join"]
    assert hooks.joined.item() == 0
    for _ in range(2):
        toy.step(2, 4, 2)
    assert hooks.calls == ["synchronize", "join", "synchronize", "synchronize"]
    assert hooks.joined.item() == 2


def test_descriptors_are_pieces_before_full_and_large_before_small(tape):
    manager = CudaGraphManager("order", CaptureSizes(requests=(1, 4), tokens=(2, 8)), BOTH, 3, tape)
    assert [replace(desc) for _, desc in manager.descriptors()] == [
        BatchDescriptor(8),
        BatchDescriptor(2),
        BatchDescriptor(12, 4, 3),
        BatchDescriptor(3, 1, 3),
    ]
