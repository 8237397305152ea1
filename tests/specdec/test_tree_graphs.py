"""Trees in graphs: replay equals eager to the bit, over shrinking batches, poisoned padding."""

import gc

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec.config import GraphConfig, graph_modes
from specdec.sizes import TreeShape
from tests.specdec.graph_walk import Walk, assert_same, give_oracle, make_backend, tiny, tiny_runner

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BATCHES = [32, 9, 1]
SIZES = {"request_sizes": (2, 32), "token_sizes": (48,)}
SHAPES = [
    ("eagle3", TreeShape(num_levels=3, top_k=4, num_nodes=7)),
    ("eagle1", TreeShape(num_levels=4, top_k=3, num_nodes=2)),
    ("eagle3", TreeShape(num_levels=1, top_k=4, num_nodes=3)),
]
RUNS = [
    *((backend, *SHAPES[0]) for backend in ("eager", "tape")),
    *(("eager", *each) for each in SHAPES[1:]),
    *(pytest.param("tape", *each, marks=pytest.mark.slow) for each in SHAPES[1:]),
    *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in SHAPES),
]


@pytest.fixture(autouse=True)
def _frozen_heap():
    gc.freeze()  # a capture collects garbage: let it walk over no more than its own
    yield
    gc.unfreeze()


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
