"""Drafts that stop, in graphs: replay equals eager to the bit, over poisoned padding and levels."""

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec.config import GraphConfig
from specdec.draft import Draft
from specdec.kernels.needed import need
from specdec.sizes import TreeShape
from tests.specdec.graph_walk import Walk, assert_same, give_oracle, make_backend, tiny, tiny_runner

BATCHES = [32, 9, 1]
SIZES = {"request_sizes": (2, 32), "token_sizes": (48,)}
TREE = TreeShape(num_levels=4, top_k=3, num_nodes=12)
K = 4
RUNS = [
    *(("eager", shape) for shape in (None, TREE)),
    *(pytest.param("tape", shape, marks=pytest.mark.slow) for shape in (None, TREE)),
    *(pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in (None, TREE)),
]


def walked(runner, oracle, is_poisoned):
    """The walk, and by step the levels that the slots of its round have drafted."""
    runner.oracle = oracle
    walk = Walk(runner, is_poisoned)
    walk.prefill()
    levels = []
    for step, size in enumerate(BATCHES):
        walk.round([(7 * b + 5 * step) % 32 for b in range(size)])
        levels.append(runner.buffers.draft_levels[:size].tolist())
        # no decision comes after a tree's last level
        is_tree = runner.sizes.tree is not None
        assert int(runner.buffers.num_going) == is_tree * levels[-1].count(K)
    return walk, levels


@pytest.fixture(scope="module")
def expected():
    """expected(shape, device): pair, plain decoding, trace and levels of a clean eager walk."""
    known = {}

    def walk(shape, device):
        key = shape, device.type
        if key not in known:
            pair = tiny("eagle3", device)
            runner = tiny_runner(pair, K, tree=shape, confidence_threshold=threshold_of(shape))
            give_oracle(runner, pair)
            clean, levels = walked(runner, runner.oracle, is_poisoned=False)
            known[key] = pair, runner.oracle, clean.trace, levels
        return known[key]

    return walk


def threshold_of(shape):
    """Some slots have one level, and some have all."""
    return 0.1 if shape is None else 0.12


@pytest.mark.parametrize("backend, shape", RUNS)
def test_a_poisoned_walk_equals_the_clean_eager_one(expected, backend, shape):
    captures, device = make_backend(backend)
    pair, oracle, trace, levels = expected(shape, device)
    config = GraphConfig(**SIZES)
    threshold = threshold_of(shape)
    runner = tiny_runner(pair, K, config, captures, tree=shape, confidence_threshold=threshold)
    walk, found = walked(runner, oracle, is_poisoned=True)
    assert_same(walk.trace, trace)
    assert found == levels
    assert set(levels[0]) == set(range(1, K + 1))
    accepted = torch.cat([step[1] for step in trace[-3:]])
    assert {0, 2} <= set(accepted.tolist())
    if captures is not None:
        counters = runner.graphs.counters()
        assert counters["draft_decode"].replays == {CUDAGraphMode.FULL: len(trace)}


@pytest.mark.parametrize("shape", [None, TREE])
def test_what_a_slot_drafts_does_not_depend_on_the_others(expected, shape):
    pair, oracle, _, levels = expected(shape, torch.device("cpu"))
    alone = tiny_runner(pair, K, tree=shape, confidence_threshold=threshold_of(shape))
    alone.oracle = oracle
    walk = Walk(alone, is_poisoned=False)
    walk.prefill()
    for row in range(0, 32, 5):  # in the first round the oracle drafts for every third of 32 rows
        held = (row * 23 % 32) % 3 == 0
        walk.round([row]) if held else alone.run_step([row], max_num_computed=90)
        b = row * 23 % 32  # 7 * 23 = 1 modulo 32
        assert alone.buffers.draft_levels[0] == levels[0][b]


@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("stops", [True, False])
def test_levels_after_the_first_may_turn_out_not_to_be_needed(monkeypatch, shape, stops):
    """Torch twins compute all the same; on a GPU the kernels go by what they are given here."""
    given = {}
    for name in ("_propose_first", "_decode_chain", "_decode_tree", "_extend_whole"):
        real = getattr(Draft, name)

        def spy(self, *others, name=name, real=real):
            given.setdefault(name, []).append(need()["needed_ptr"])
            return real(self, *others)

        monkeypatch.setattr(Draft, name, spy)
    pair = tiny("eagle3", torch.device("cpu"))
    threshold = threshold_of(shape) if stops else 0.0
    runner = tiny_runner(pair, K, tree=shape, confidence_threshold=threshold)
    give_oracle(runner, pair)
    walked_to = Walk(runner, False)
    walked_to.prefill()
    walked_to.round(list(range(4)))
    levels = given.pop("_decode_chain" if shape is None else "_decode_tree")
    assert levels
    assert all(each is (runner.buffers.num_going if stops else None) for each in levels)
    assert len(given) == 2
    assert all(each is None for calls in given.values() for each in calls)
