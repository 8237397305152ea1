"""Trees in graphs: replay equals eager to the bit, over shrinking batches, poisoned padding.

And where a step's drafts are chains or trees.
"""

import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec.config import GraphConfig, graph_modes
from specdec.passes.families import GraphFamilies
from specdec.scheduling.work import Round
from specdec.sizes import PLAIN, EngineSizes, TreeShape, chain
from tests.specdec.graph_walk import Walk, assert_same, give_oracle, make_backend, tiny, tiny_runner

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BATCHES = [32, 9, 1]
SIZES = {"request_sizes": (2, 32), "token_sizes": (48,)}
SHAPES = [
    ("eagle3", TreeShape(num_levels=3, top_k=4, num_nodes=7)),
    ("eagle1", TreeShape(num_levels=4, top_k=3, num_nodes=2)),
    ("eagle3", TreeShape(num_levels=1, top_k=4, num_nodes=3)),
]
OF_BLOCKS = [(kind, SHAPES[0][1]) for kind in ("dflash", "dspark")]
RUNS = [
    *((backend, *SHAPES[0]) for backend in ("eager", "tape")),
    *(("eager", *each) for each in SHAPES[1:]),
    *(pytest.param("tape", *each, marks=pytest.mark.slow) for each in (*SHAPES[1:], *OF_BLOCKS)),
    *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in SHAPES),
]


def walked(runner, oracle, is_poisoned):
    runner.oracle = oracle
    walk = Walk(runner, is_poisoned)
    walk.prefill()
    for step, size in enumerate(BATCHES):
        walk.round([(7 * b + 5 * step) % 32 for b in range(size)])
    return walk


@pytest.fixture(scope="module")
def expected():
    """expected(draft, shape, device): pair, plain decoding and the trace of a clean eager walk."""
    known = {}

    def walk(draft, shape, device):
        key = draft, shape, device.type
        if key not in known:
            pair = tiny(draft, device)
            runner = tiny_runner(pair, shape.num_levels, tree=shape)
            give_oracle(runner, pair)
            known[key] = pair, runner.oracle, walked(runner, runner.oracle, is_poisoned=False).trace
        return known[key]

    return walk


def run(pair, oracle, shape, captures, modes=None):
    config = GraphConfig(**SIZES, modes=graph_modes(modes))
    runner = tiny_runner(pair, shape.num_levels, config, captures, tree=shape)
    return walked(runner, oracle, is_poisoned=True)


@pytest.mark.parametrize("backend, draft, shape", RUNS)
def test_a_poisoned_walk_equals_the_clean_eager_one(expected, backend, draft, shape):
    captures, device = make_backend(backend)
    pair, oracle, trace = expected(draft, shape, device)
    walk = run(pair, oracle, shape, captures)
    assert_same(walk.trace, trace)
    assert {0, min(2, shape.max_depth)} <= set(torch.cat([step[1] for step in trace[-3:]]).tolist())
    if captures is not None:
        counters = walk.runner.graphs.counters()
        assert counters["target_decode"].replays == {FULL: 3}
        assert counters["draft_prefill"].replays[FULL] == 3
        assert counters["draft_decode"].replays == {FULL: len(trace)}


@pytest.mark.parametrize(
    "backend",
    [pytest.param("tape", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_families_may_be_off_or_in_pieces_with_the_same_trees(expected, backend):
    captures, device = make_backend(backend)
    draft, shape = SHAPES[0]
    pair, oracle, trace = expected(draft, shape, device)
    for modes in (
        {"draft_prefill": "PIECEWISE", "target_decode": "NONE"},
        {"draft_prefill": "FULL_DECODE_ONLY", "draft_decode": "NONE"},
    ):
        assert_same(run(pair, oracle, shape, captures, modes).trace, trace)


BOTH = TreeShape(num_levels=3, top_k=3, num_nodes=7)
TREE = BOTH.drafts
# requests, what verifies, rows if they are shared out, and what is proposed after it
MIXTURE = [
    ([4, 1, 9, 2, 30], chain(3), 12, TREE),
    ([4, 1, 9, 2, 30], TREE, 0, TREE),
    ([1, 9, 2], TREE, 0, chain(3)),
    ([9, 1], chain(3), 8, TREE),
    ([1, 9], PLAIN, 0, PLAIN),  # trees are dropped
    ([1, 9], chain(3), 2, TREE),
    ([9, 1], TREE, 0, PLAIN),
    ([1], chain(3), 1, chain(1)),
    ([1], chain(3), 2, TREE),
    ([1], TREE, 0, TREE),
    ([1], TREE, 0, chain(1)),
]


@pytest.mark.parametrize(
    "backend, draft, threshold",
    [
        ("eager", "eagle3", 0.0),
        ("eager", "dspark", 0.0),
        # e2e/test_auto_trees.py takes turns too
        pytest.param("tape", "eagle3", 0.12, marks=pytest.mark.slow),
        pytest.param("tape", "eagle3", 0.0, marks=pytest.mark.slow),
        pytest.param("tape", "dflash", 0.0, marks=pytest.mark.slow),
        pytest.param("tape", "dspark", 0.0, marks=pytest.mark.slow),
        pytest.param("cuda", "eagle3", 0.0, marks=pytest.mark.gpu),
        pytest.param("cuda", "eagle3", 0.12, marks=pytest.mark.gpu),
        pytest.param("cuda", "dspark", 0.0, marks=pytest.mark.gpu),
    ],
)
def test_chains_and_trees_in_turn_over_poison_equal_clean_eager_ones(backend, draft, threshold):
    captures, device = make_backend(backend)
    pair = tiny(draft, device)
    is_block = draft != "eagle3"
    traces = []
    for is_clean in (True, False):
        config = GraphConfig(request_sizes=(2,), token_sizes=(48,))
        how = (None, None) if is_clean else (config, captures)
        how_drafted = {"tree": BOTH, "is_adaptive": True, "confidence_threshold": threshold}
        runner = tiny_runner(pair, BOTH.num_levels, *how, **how_drafted)
        walk = Walk(runner, is_poisoned=not is_clean)
        walk.prefill()
        after_prompts = runner.graphs.counters()["draft_decode"].replays.copy()
        for rows, shape, shared_rows, next_shape in MIXTURE:
            if is_block and next_shape == chain(1):
                next_shape = chain(2)  # half a block
            walk.step(rows, shape=shape, shared_rows=shared_rows, next_shape=next_shape)
        traces.append(walk.trace)
    assert_same(*traces)
    if captures is not None:
        counters = runner.graphs.counters()
        assert counters["target_decode"].replays == {FULL: 10}
        assert counters["target_plain"].replays == {FULL: 1}
        if not is_block:
            assert counters["draft_extend"].replays == {FULL: 1}
        assert counters["draft_prefill"].replays[FULL] == 10 + is_block
        # six wide drafts, and the two further levels of a chain, or all of three chains
        assert counters["draft_decode"].replays - after_prompts == {FULL: 6 + 2 + is_block}


def test_no_graph_after_a_round_of_trees_has_more_slots_than_trees_have_room():
    """Request counts that lack the small ones: rows of few paths fit a graph of many requests."""
    sizes = EngineSizes(
        max_model_len=64,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        num_kv_blocks=1,
        num_speculative_tokens=5,
        is_adaptive=True,
        tree=TreeShape(num_levels=5, top_k=2, num_nodes=11, smaller=((2, 4, 8), (3, 4, 6))),
    )
    assert sizes.max_tree_requests < 10
    config = GraphConfig(request_sizes=(10, 12), token_sizes=(48,))
    families = GraphFamilies(config, TapeBackend(), sizes, has_draft=True)
    for manager in families.managers:
        manager._dispatcher.set_captured([desc for _, desc in manager.descriptors()])
    for num_reqs in range(1, sizes.max_tree_requests + 1):
        shape = sizes.shape_of(num_reqs, is_wide=True)
        round = Round(state_rows=[0] * num_reqs, shape=shape, next_shape=chain(5))
        passes = families.passes(round, 64, is_drawn=False)
        assert passes.draft_prefill.mode is FULL
        assert passes.draft_prefill.descriptor.num_reqs <= sizes.max_tree_requests
