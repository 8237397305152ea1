"""Levels of drafts whose head is cut: buffers and state are those of one rank, bit for bit."""

import copy

import pytest
import torch

from specdec.kernels.best_children import Perturbation
from specdec.kernels.choose_token import NoiseKeys
from specdec.kernels.gumbel import TARGET
from specdec.rounds import propose
from specdec.rounds.fill import fill_round_ref
from specdec.rounds.propose import propose_level
from specdec.sizes import TreeShape, chain
from tests.specdec.buffer_tensors import buffer_tensors
from tests.specdec.fake_ranks import FakeRanks
from tests.specdec.rounds.levels import level_of
from tests.specdec.rounds.test_round_kernels import MAX_LEN, make
from tests.specdec.rounds.test_tree_kernels import NUM_REQS
from tests.specdec.rounds.test_tree_kernels import make as make_wide

D, W = 64, 1000  # blocks of 64 ids: 16 on 8 ranks, the last one shorter
TREE_W = 520  # blocks of 64 ids
TREE, SLOTS = TreeShape(num_levels=2, top_k=3, num_nodes=8), 2


@pytest.fixture(params=["kernel", "twin"], autouse=True)
def _way(request, monkeypatch):
    torch.manual_seed(0)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(propose, "use_triton", lambda _: request.param == "kernel")
    monkeypatch.setattr("specdec.kernels.linear.use_triton", lambda _: False)


def keys_of(num_rows, d2t):
    return NoiseKeys(
        temperatures=torch.tensor([0.0, 0.7, 1.3])[torch.arange(num_rows) % 3],
        seeds=torch.arange(2 * num_rows).view(num_rows, 2),
        positions=torch.arange(num_rows) + 9,
        epochs=torch.zeros(num_rows, dtype=torch.int64),
        stream=TARGET,
        token_ids=d2t,
    )


def numbers(case):
    buffers, state = case
    found = {name: tensor.nan_to_num() for name, tensor in buffer_tensors(buffers).items()}
    for name in ("draft_tokens", "draft_parents", "num_nodes", "draft_probs"):
        found[name] = getattr(state, name)[:-1].nan_to_num()
    return found


def assert_as_whole(size, start, write, vocab_size=W):
    """write(buffers and state, columns of a weight, cut)"""

    def of_rank(rank):
        case, cut = copy.deepcopy(start), rank.cut(vocab_size)
        write(case, slice(cut.ids.start, cut.ids.stop), cut)
        return numbers(case)

    whole = copy.deepcopy(start)
    write(whole, slice(None), None)
    expected = numbers(whole)
    for found in FakeRanks(size).run(of_rank):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    return expected


def head():
    """Whole numbers, whose products have no order; equal rows of ranks, and within one."""
    weight = torch.randint(-2, 3, (W, D)).float() / 4
    weight[W // 2 :] = weight[: W // 2].clone()
    weight[1::7] = weight[::7].clone()
    return weight


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_nodes_of_a_chain_are_those_of_one_rank(size, is_drawn):
    K = 3
    start = make(torch.device("cpu"), K, keeps_probs=True)
    fill_round_ref(*start, 5, chain(K), 0, MAX_LEN)
    start[0].draft_levels[:5] = 0
    normed, weight = torch.randint(-2, 3, (5, D)).float(), head()
    d2t = torch.randperm(3 * W)[:W].sort().values if is_drawn else None
    noise = Perturbation(torch.tensor([-torch.inf, 2.0, -torch.inf, 0.0, 1.0]), keys_of(5, d2t))
    more = {"d2t_W": d2t, "calibration": torch.ones(2, K)}

    def write(case, ids, cut):
        to = level_of(*case, 0, MAX_LEN, cut=cut, **more)
        propose_level(normed, weight[ids].contiguous(), to, (lambda _: noise) if is_drawn else None)

    found = assert_as_whole(size, start, write)
    assert len(set(found["draft_tokens"][:5, 0].tolist())) > 3
    assert (found["draft_probs"][:5, 0] > 0).sum() > 2


@pytest.mark.parametrize("is_drawn", [False, True])
def test_nodes_of_a_tree_are_those_of_one_rank(is_drawn):
    start = make_wide(torch.device("cpu"), TREE)
    buffers = start[0]
    buffers.sample_mapping[:NUM_REQS] = buffers.idx_mapping[:NUM_REQS]
    weight = head()[:TREE_W]
    normed = [torch.randint(-2, 3, (n * SLOTS, D)).float() for n in (1, TREE.top_k)]
    d2t = torch.randperm(3 * W)[:TREE_W].sort().values if is_drawn else None

    def write(case, ids, cut):
        for level, rows in enumerate(normed):
            noise = Perturbation(torch.full((len(rows),), -torch.inf), keys_of(len(rows), d2t))
            to = level_of(*case, level, MAX_LEN, cut=cut, d2t_W=d2t)
            draw = (lambda _, noise=noise: noise) if is_drawn else None
            propose_level(rows, weight[ids].contiguous(), to, draw)

    found = assert_as_whole(2, start, write, TREE_W)
    assert len(set(found["draft_tokens"][0].tolist())) > 3
