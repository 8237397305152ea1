"""Drafts that stop, in graphs: replay equals eager to the bit, over poisoned padding and levels."""

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec.config import GraphConfig
from specdec.drafts.eagle import EagleDrafter
from specdec.kernels.needed import need
from specdec.sizes import TreeShape
from tests.specdec.graph_walk import Walk, assert_same, give_oracle, make_backend, tiny, tiny_runner
from tests.specdec.rounds.test_stop import expected_levels

BATCHES = [32, 9, 1]
SIZES = {"request_sizes": (2, 32), "token_sizes": (48,)}
TREE = TreeShape(num_levels=4, top_k=3, num_nodes=12)
K = 4
THRESHOLD = 0.06  # at which the rounds stop after different levels
BOUNDS = (2, K, 3)  # by state row
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
    state, tree = runner.state, None if runner.sizes.tree is None else runner.buffers.candidates
    for row in range(32):
        state.num_draft_tokens[row] = BOUNDS[row % 3]
    levels = []
    for step, size in enumerate(BATCHES):
        rows = [(7 * b + 5 * step) % 32 for b in range(size)]
        walk.round(rows)
        if tree is None:
            drafted, paths = state.num_nodes[rows], state.draft_probs[rows]
        else:
            k, drafted = tree.shape.width, runner.buffers.draft_levels[:size]
            of_levels = tree.scores[:size].split([k, *[k * k] * (K - 1)], dim=1)
            paths = torch.stack([each.amax(dim=1) for each in of_levels], dim=1).exp()
        levels.append(drafted.tolist())
        bounds = [BOUNDS[row % 3] for row in rows]
        expected, going = expected_levels(paths.tolist(), bounds, THRESHOLD)
        assert levels[-1] == expected
        # no decision comes after a tree's last level
        assert int(runner.buffers.num_going) == (0 if tree is None else going[-1])
        assert int(runner.buffers.votes) == 0
    return walk, levels


@pytest.fixture(scope="module")
def expected():
    """expected(shape, device): pair, plain decoding, trace and levels of a clean eager walk."""
    known = {}

    def walk(shape, device):
        key = shape, device.type
        if key not in known:
            pair = tiny("eagle3", device)
            runner = tiny_runner(pair, K, tree=shape, confidence_threshold=THRESHOLD)
            give_oracle(runner, pair)
            clean, levels = walked(runner, runner.oracle, is_poisoned=False)
            known[key] = pair, runner.oracle, clean.trace, levels
        return known[key]

    return walk


@pytest.mark.parametrize("backend, shape", RUNS)
def test_a_poisoned_walk_equals_the_clean_eager_one(expected, backend, shape):
    captures, device = make_backend(backend)
    pair, oracle, trace, levels = expected(shape, device)
    config = GraphConfig(**SIZES)
    how = {"tree": shape, "confidence_threshold": THRESHOLD}
    runner = tiny_runner(pair, K, config, captures, **how)
    walk, found = walked(runner, oracle, is_poisoned=True)
    assert_same(walk.trace, trace)
    assert found == levels
    assert [max(each) for each in levels] == [2, 3, 2]
    assert min(levels[1]) == 2  # of requests that may have no more
    accepted = torch.cat([step[1] for step in trace[-3:]])
    assert {0, 2} <= set(accepted.tolist())
    if captures is not None:
        counters = runner.graphs.counters()
        assert counters["draft_decode"].replays == {CUDAGraphMode.FULL: len(trace)}


@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("stops", [True, False])
def test_levels_after_the_first_may_turn_out_not_to_be_needed(monkeypatch, shape, stops):
    """Torch twins compute all the same; on a GPU the kernels go by what they are given here."""
    given = {}
    for name in ("_propose", "_extend_whole"):
        real = getattr(EagleDrafter, name)

        def spy(self, *others, name=name, real=real):
            given.setdefault(name, []).append(need()["needed_ptr"])
            return real(self, *others)

        monkeypatch.setattr(EagleDrafter, name, spy)
    pair = tiny("eagle3", torch.device("cpu"))
    threshold = THRESHOLD if stops else 0.0
    runner = tiny_runner(pair, K, tree=shape, confidence_threshold=threshold)
    give_oracle(runner, pair)
    walked_to = Walk(runner, False)
    walked_to.prefill()
    walked_to.round(list(range(4)))
    levels = given.pop("_propose")
    per_step = 1 if runner.sizes.is_adaptive else K
    firsts, others = levels[::per_step], [x for i, x in enumerate(levels) if i % per_step]
    assert len(firsts) * (per_step - 1) == len(others) > 0
    assert all(each is (runner.buffers.num_going if stops else None) for each in others)
    assert all(each is None for each in (*firsts, *given.pop("_extend_whole")))
