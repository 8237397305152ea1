"""Replay equals eager bit for bit, drafts too, over batches of all sizes with poisoned padding."""

import threading

import pytest
import torch

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.protocol import CaptureError
from graphs.tape.backend import TapeBackend
from specdec.config import GraphConfig, graph_modes
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import GraphFamilies, init_piecewise
from specdec.rounds.short import SHORT_KEYS
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import EngineSizes, chain
from specdec.target import Target
from tests.specdec.graph_walk import Walk, assert_same, give_oracle, make_backend, tiny, tiny_runner

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BATCHES = [32, 12, 1, 17]
REQUESTS, TOKENS = (1, 4, 16, 32), (5, 24, 48)
SIZES = {"request_sizes": REQUESTS, "token_sizes": TOKENS}
IN_PIECES = {"target_prefill": "PIECEWISE", "draft_prefill": "PIECEWISE"}
FEW = {"request_sizes": (32,), "token_sizes": (48,)}

graphs = pytest.mark.parametrize("backend", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])


def walked(runner, oracle, is_poisoned, batches=BATCHES):
    runner.oracle = oracle
    walk = Walk(runner, is_poisoned)
    walk.prefill()
    for step, size in enumerate(batches):
        walk.round([(7 * b + 5 * step) % 32 for b in range(size)])
    return walk


@pytest.fixture(scope="module")
def expected():
    """expected(draft, k, device, head_dim=32): pair, plain decoding, a clean eager walk's trace."""
    known = {}

    def walk(draft, k, device, head_dim=32):
        key = draft, k, device.type, head_dim
        if key not in known:
            pair = tiny(draft, device, head_dim)
            runner = tiny_runner(pair, k)
            give_oracle(runner, pair)
            known[key] = pair, runner.oracle, walked(runner, runner.oracle, is_poisoned=False).trace
        return known[key]

    return walk


PAIRS = [
    (None, 0, 32),
    ("eagle3", 1, 96),
    ("eagle3", 3, 32),
    ("eagle1", 2, 32),
    ("eagle3, experts", 3, 32),
    ("dflash", 2, 32),
    ("dspark", 3, 32),
    ("dflash2", 3, 32),
    ("peagle", 3, 32),
]


@pytest.mark.parametrize(
    "backend, draft, k, head_dim",
    [
        *(("eager", *each) for each in PAIRS[:5]),
        *(("tape", *each) for each in (PAIRS[0], PAIRS[2])),
        *(pytest.param("tape", *PAIRS[i], marks=pytest.mark.slow) for i in (1, 3, 4, 5, 6, 7, 8)),
        *(pytest.param("eager", *each, marks=pytest.mark.slow) for each in PAIRS[5:]),
        *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in PAIRS),
    ],
)
def test_a_poisoned_walk_equals_the_clean_eager_one(expected, backend, draft, k, head_dim):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected(draft, k, device, head_dim)
    walk = walked(tiny_runner(pair, k, GraphConfig(**SIZES), captures), oracle, is_poisoned=True)
    assert_same(walk.trace, trace)
    if k > 1:
        assert {0, 2} <= set(torch.cat([step[1] for step in trace[-len(BATCHES) :]]).tolist())


@graphs
@pytest.mark.parametrize(
    "modes",
    [
        {"draft_prefill": "PIECEWISE"},
        {"draft_prefill": "FULL_DECODE_ONLY"},
        pytest.param({"target_decode": "NONE"}, marks=pytest.mark.slow),
        pytest.param({"target_decode": "NONE", "draft_prefill": "NONE"}, marks=pytest.mark.slow),
        {"target_decode": "NONE", "draft_prefill": "PIECEWISE", "draft_decode": "NONE"},
        pytest.param({"target_prefill": "NONE", "draft_decode": "NONE"}, marks=pytest.mark.slow),
    ],
)
def test_families_may_be_off_or_in_pieces_with_the_same_drafts(expected, backend, modes):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    config = GraphConfig(request_sizes=(4, 32), token_sizes=(48, 128), modes=graph_modes(modes))
    walk = walked(tiny_runner(pair, 3, config, captures), oracle, is_poisoned=True)
    assert_same(walk.trace, trace)
    counters = walk.runner.graphs.counters()
    for family, mode in modes.items():
        assert counters[family].replays[FULL] == (len(BATCHES) if mode == "FULL_DECODE_ONLY" else 0)
    if modes == {"draft_prefill": "PIECEWISE"}:
        assert counters["draft_prefill"].replays == {
            PIECEWISE: len(BATCHES) + counters["target_prefill"].replays[FULL]
        }


@graphs
@pytest.mark.parametrize("mode", [PIECEWISE, pytest.param(FULL, marks=pytest.mark.slow)])
def test_rounds_replay_whole_and_chunks_as_asked(expected, backend, mode):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    modes = {} if mode is FULL else {"target_prefill": "PIECEWISE"}
    config = GraphConfig(**SIZES, modes=graph_modes(modes))
    walk = walked(tiny_runner(pair, 3, config, captures), oracle, is_poisoned=True)
    assert_same(walk.trace, trace)
    counters, num_chunks = walk.runner.graphs.counters(), len(walk.trace) - len(BATCHES)
    assert {
        name: dict(counter.replays) for name, counter in counters.items() if counter.replays
    } == {
        "target_prefill": {mode: num_chunks},
        "target_decode": {FULL: len(BATCHES)},
        "target_choice": {FULL: len(BATCHES)},
        "draft_prefill": {PIECEWISE: num_chunks, FULL: len(BATCHES)},
        "draft_decode": {FULL: len(BATCHES) + num_chunks},
    }
    assert all(NONE not in counter.dispatches for counter in counters.values())
    assert counters["target_decode"].padded_tokens == 4 * ((16 - 12) + (32 - 17))
    assert all(counter.num_graphs and counter.seconds for counter in counters.values())
    own = [counter for name, counter in counters.items() if not name.endswith("_sampled")]
    assert all(counter.num_bytes for counter in own)  # the others use the memory of these


@graphs
@pytest.mark.parametrize(
    "draft, k",
    [
        ("eagle3", 3),
        pytest.param("eagle1", 2, marks=pytest.mark.slow),
        pytest.param("eagle3, experts", 3, marks=pytest.mark.slow),
    ],
)
def test_compiled_pieces_give_the_same_drafts(expected, backend, draft, k):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected(draft, k, device)
    modes = graph_modes({"target_prefill": "PIECEWISE"})
    config = GraphConfig(**FEW, modes=modes, compile_piecewise=True)
    walk = walked(
        tiny_runner(pair, k, config, captures), oracle, is_poisoned=True, batches=BATCHES[:1]
    )
    assert_same(walk.trace, trace[: len(walk.trace)])
    assert walk.runner.graphs.target.prefill.counters.replays[PIECEWISE] == len(walk.trace) - 1


@pytest.mark.parametrize("k", range(1, 9))
def test_every_count_up_to_the_largest_has_a_graph(k):
    captures, _ = make_backend("tape")
    families = GraphFamilies(GraphConfig(), captures, limits(20, 70, k), has_draft=True)
    x = torch.zeros(1)

    def maker(manager):
        def model(x):
            x.add_(1)

        def make(desc, warmup):
            return lambda: (
                model(x) if warmup or desc.num_reqs else run_pieces(manager, model, desc, x)
            )

        init_piecewise(manager, model)
        return make

    families.capture([(manager, maker(manager)) for manager in families.managers])
    for num_reqs in range(1, 21):
        passes = families.passes(round_of(k, [0] * num_reqs), 64, is_drawn=False)
        assert {passes.target.mode, passes.draft_prefill.mode, passes.draft_decode.mode} == {FULL}
        assert num_reqs <= passes.num_reqs <= 20
    for num_tokens in range(1, 71):
        lengths = [1] * min(num_tokens - 1, 19)
        lengths.append(num_tokens - len(lengths))
        parts = [PromptPart(**NO_PART, prompt=[0] * n, start=0, length=n) for n in lengths]
        for longest, mode in ((64, FULL), (SHORT_KEYS + 1, PIECEWISE)):
            passes = families.passes(round_of(k, parts=parts), longest, is_drawn=False)
            assert (passes.target.mode, passes.draft_prefill.mode) == (mode, PIECEWISE)
            assert passes.num_tokens >= num_tokens


NO_PART = {"state_row": 0, "blocks": [0]}


def round_of(k, rows=(), parts=()):
    return Round(state_rows=rows, shape=chain(k), next_shape=chain(k), parts=parts)


def limits(max_num_seqs, max_num_batched_tokens, k):
    return EngineSizes(
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=1,
        num_speculative_tokens=k,
    )


def run_pieces(manager, model, desc, x):
    context = ForwardContext(
        attn_metadata=None,
        slot_mapping=None,
        num_tokens=1,
        runtime_mode=PIECEWISE,
        batch_descriptor=desc,
    )
    with set_forward_context(context):
        manager.run_pw_graph(model, {"x": x})


def test_a_family_of_ragged_batches_cannot_be_full():
    modes = graph_modes() | {"target_prefill": FULL}
    sizes = limits(2, 8, 1)
    with pytest.raises(
        ValueError, match="target_prefill: mode=FULL asks for full graphs of ragged batches"
    ):
        GraphFamilies(GraphConfig(modes=modes), None, sizes, has_draft=True)
    families = GraphFamilies(GraphConfig(), TapeBackend(), sizes, has_draft=True)
    managers = (families.target.decode, families.target.plain, families.draft.decode)
    assert {manager.mode for manager in managers} == {CUDAGraphMode.FULL_DECODE_ONLY}


@pytest.mark.slow
def test_engines_of_one_process_may_all_be_split_by_torch_compile(expected):
    captures, device = make_backend("tape")
    pair, _, _ = expected("eagle3", 3, device)
    config = GraphConfig(request_sizes=(2,), token_sizes=(16,), compile_piecewise=True)
    with torch._dynamo.config.patch(recompile_limit=1):  # code that they share is traced for each
        for _ in range(2):
            runner = tiny_runner(pair, 3, config, captures)
            assert all(counter.captures for counter in runner.graphs.counters().values())
            runner.graphs.clear_all_graphs()


def test_every_family_warms_up_in_mode_none_and_is_captured_in_its_own(monkeypatch, expected):
    captures, device = make_backend("tape")
    pair = expected("eagle3", 3, device)[0]  # made here first, it has contexts of its own
    made, build = [], ForwardContexts._context

    def context(self, how, *rows, **of):
        made.append(how)
        return build(self, how, *rows, **of)

    monkeypatch.setattr(ForwardContexts, "_context", context)
    config = GraphConfig(request_sizes=(2, 32), token_sizes=(48,))
    runner = tiny_runner(pair, 3, config, captures)
    counters = runner.graphs.counters()
    assert counters.pop("target_choice").captures  # which has no context
    assert len(made) == 2 * sum(len(counter.captures) for counter in counters.values())
    for warmup, captured in zip(made[::2], made[1::2], strict=True):
        assert (warmup.mode, warmup.descriptor) == (NONE, captured.descriptor)
        assert captured.mode is (FULL if captured.descriptor.num_reqs else PIECEWISE)


@graphs
def test_cleared_graphs_give_the_memory_back_and_eager_goes_on(expected, backend):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    runner = tiny_runner(pair, 3, GraphConfig(request_sizes=(32,), token_sizes=(48,)), captures)
    assert min(held_bytes(runner)) > 0
    runner.graphs.clear_all_graphs()
    assert set(held_bytes(runner)) == {0}
    assert_same(walked(runner, oracle, is_poisoned=True).trace, trace)
    assert all(not counter.replays for counter in runner.graphs.counters().values())


@graphs
def test_measuring_keeps_no_graph(expected, backend):
    captures, device = make_backend(backend)
    pair, _, _ = expected("eagle3", 3, device)
    runner = tiny_runner(
        pair, 3, GraphConfig(modes=graph_modes(dict.fromkeys(graph_modes(), "NONE"))), captures
    )
    assert set(runner.measure().values()) == {0}
    runner = tiny_runner(pair, 3, GraphConfig(request_sizes=(8,), token_sizes=(16,)), captures)
    runner.graphs.clear_all_graphs()
    found = runner.measure()
    assert all(size > 0 for name, size in found.items() if not name.endswith("_sampled"))
    assert set(held_bytes(runner)) == {0}


def held_bytes(runner):
    """Of each family; what the device has free moves with every other process."""
    return [manager.num_bytes() for manager in runner.graphs.managers]


@graphs
def test_nothing_is_captured_once_serving_began(expected, backend):
    captures, device = make_backend(backend)
    pair, _, _ = expected("eagle3", 3, device)
    runner = tiny_runner(pair, 3, GraphConfig(request_sizes=(2,), token_sizes=(16,)), captures)
    runner.graphs.target.decode.clear_graphs()
    with (
        pytest.raises(CaptureError, match="capture ended when serving began"),
        torch.inference_mode(),
    ):
        runner.graphs.target.decode.capture(runner.target.make_verify)


@pytest.mark.slow
@graphs
def test_two_engines_that_start_in_two_threads_do_not_forbid_each_others_captures(
    monkeypatch, expected, backend
):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    second, make_prefill = [], Target.make_prefill
    few = GraphConfig(**FEW)

    def start_another(target, desc, warmup):
        monkeypatch.setattr(Target, "make_prefill", make_prefill)
        thread = threading.Thread(target=lambda: second.append(tiny_runner(pair, 3, few, captures)))
        thread.start()
        thread.join()
        return make_prefill(target, desc, warmup)

    monkeypatch.setattr(Target, "make_prefill", start_another)
    first = tiny_runner(pair, 3, few, captures)
    assert_same(walked(first, oracle, is_poisoned=True).trace, trace)
    first.graphs.clear_all_graphs()
    assert (max(held_bytes(first)), min(held_bytes(second[0])) > 0) == (0, True)
    assert_same(walked(second[0], oracle, is_poisoned=True).trace, trace)
    assert second[0].graphs.target.decode.counters.replays == {FULL: len(BATCHES)}


@graphs
@pytest.mark.parametrize(
    "name, words",
    [
        pytest.param("input_ids", "input_ids_T", marks=pytest.mark.slow),
        ("slot_mapping", "slot_mapping"),
    ],
)
def test_a_moved_buffer_is_named(monkeypatch, expected, backend, name, words):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    runner = tiny_runner(pair, 3, GraphConfig(**FEW, modes=graph_modes(IN_PIECES)), captures)
    assert_same(walked(runner, oracle, is_poisoned=True).trace, trace)
    setattr(runner.buffers, name, getattr(runner.buffers, name).clone())
    with pytest.raises(CaptureError, match=words):
        Walk(runner, is_poisoned=False).prefill()


@graphs
def test_stale_padding_is_caught_by_the_walk(monkeypatch, expected, backend):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected("eagle3", 3, device)
    runner = tiny_runner(pair, 3, GraphConfig(**FEW), captures)
    monkeypatch.setattr(
        "specdec.step.upload", lambda buffer, values: buffer[: sum(values >= 0)].copy_(rows(values))
    )
    with pytest.raises(AssertionError, match="step"):
        assert_same(walked(runner, oracle, is_poisoned=False).trace, trace)


def rows(values):
    return torch.from_numpy(values[values >= 0])


def test_a_slot_may_have_all_rows_that_others_leave():
    """A graph of as many rows as slots serves fewer requests too, one of which may have drafts."""
    pair = tiny("eagle3", torch.device("cpu"))
    sizes = EngineSizes(
        max_model_len=100,
        max_num_seqs=20,
        max_num_batched_tokens=48,
        num_kv_blocks=1,
        num_speculative_tokens=8,
        is_adaptive=True,
    )
    runner = Runner(pair.target, pair.eagle, sizes, torch.device("cpu"))
    for num_reqs, num_rows in runner.graphs.shapes:
        desc = BatchDescriptor(num_rows, num_reqs)
        [group] = runner.target.contexts.dummy_round(desc, warmup=False).attn_metadata.groups
        assert group.max_query_len == min(9, num_rows)
        assert group.num_rows == num_rows
