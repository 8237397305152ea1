"""kernel == twin for draft trees: integers to the bit, scores but for the last digits."""

import copy
import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from specdec.kernels.move_slots import move_slots, move_slots_ref
from specdec.requests.draft_tree import depths
from specdec.rounds import gather_paths
from specdec.rounds.buffers import CONFIDENCE_ONE
from specdec.rounds.commit import decision_ref, launch_decision
from specdec.rounds.fill import fill_round, fill_round_ref
from specdec.rounds.gather_paths import launch_move_prompts, move_prompts_ref
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.sizes import DraftShape, TreeShape, chain
from tests.specdec.buffer_tensors import buffer_tensors, step_buffers
from tests.specdec.kernels.by_kernel import by_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_LEN = 150
NUM_REQS = 6
SHAPES = [
    TreeShape(num_levels=3, top_k=3, num_nodes=7),
    TreeShape(num_levels=2, top_k=4, num_nodes=16),
    TreeShape(num_levels=4, top_k=2, num_nodes=3),
    TreeShape(num_levels=1, top_k=5, num_nodes=2),
]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


def make(device, shape, more_rows=64):
    """6 batch slots, the fourth of which is padding, and the last at the end of its context.

    Poison where nothing is written.
    """
    buffers = step_buffers(device, 6, shape, 8, more_rows, is_adaptive=True)
    state = RequestState(6, shape.drafts, 3, 99, device, vocab_size=5, has_probs=True)
    for tensor in buffer_tensors(buffers).values():
        tensor.fill_(-999 if tensor.dtype == torch.int64 else torch.nan)
    lengths = (63, MAX_LEN, 64, MAX_LEN - 2, MAX_LEN - 1, 7)
    for row, length in enumerate(lengths):
        own = 1 if row == 2 else shape.num_levels
        start_rows(
            state, [(row, RowStart(blocks=[10 + row, 20 + row, 30 + row], num_draft_tokens=own))]
        )
        state.num_computed_tokens[row] = length
        tokens, parents = random_tree(shape, row)
        most = min(own, MAX_LEN - 1 - length)
        is_live = [depth <= most for depth in depths(parents)[1:]]
        state.num_nodes[row] = sum(1 for _ in itertools.takewhile(bool, is_live))
        state.draft_tokens[row] = torch.tensor(tokens)
        state.draft_parents[row] = torch.tensor(parents)
    for nodes in (state.draft_tokens, state.draft_parents):
        nodes[-1] = 10**6  # what padding has left
    state.draft_probs[:-1] = torch.rand(
        6, shape.num_nodes, generator=torch.Generator().manual_seed(5)
    )
    state.num_computed_tokens[-1] = 10**6
    state.last_sampled_tokens.copy_(torch.arange(7) + 100)
    buffers.idx_mapping[:NUM_REQS] = torch.tensor([4, 0, 2, -1, 3, 1], device=device)
    return buffers, state


def random_tree(shape, seed):
    """Tokens that siblings do not share, and parents."""
    rng = random.Random(seed)
    parents = []
    for _ in range(shape.num_nodes):
        inner = [i for i, depth in enumerate(depths(parents)) if depth < shape.max_depth]
        parents.append(rng.choice(inner))
    tokens = [parents[:i].count(parent) for i, parent in enumerate(parents)]
    return tokens, parents


def assert_same(ours, theirs):
    """Buffers and state rows are equal, scores nearly; the scratch row does not count."""
    for (name, a), b in zip(
        buffer_tensors(ours[0]).items(), buffer_tensors(theirs[0]).values(), strict=True
    ):
        if name != "candidate_rows":
            assert torch.allclose(a.nan_to_num(9e9), b.nan_to_num(9e9), 0, 1e-5), name
    names = ("last_sampled_tokens", "num_computed_tokens", "draft_tokens")
    for name in (*names, "draft_parents", "num_nodes"):
        assert torch.equal(getattr(ours[1], name)[:-1], getattr(theirs[1], name)[:-1]), name
    assert torch.allclose(ours[1].draft_probs[:-1], theirs[1].draft_probs[:-1], 1e-5, 1e-7)
    histories = [each[1].sampling.history[:-1] for each in (ours, theirs)]
    assert torch.equal(*histories)


@pytest.mark.parametrize("num_cut", [0, 1])
def test_fill_rows_with_paths(device, shape, num_cut):
    """With rows for all nodes, or all but the last ones."""
    ours = make(device, shape)
    theirs = copy.deepcopy(ours)
    N = shape.num_nodes + 1 - num_cut
    what = NUM_REQS, DraftShape(shape.num_levels, shape.top_k, N - 1), 0, MAX_LEN
    by_kernel(fill_round)(*ours, *what)
    fill_round_ref(*theirs, *what)
    assert_same(ours, theirs)
    assert ours[0].num_valid[3] == ours[0].num_valid[5] == 0
    assert ours[0].path_starts[5] == 0
    assert ours[0].num_valid[0] == 1  # at the end of the context there is room for the root alone
    assert ours[0].num_valid[1] == N
    rows = ours[0].path_rows[: NUM_REQS * N]
    slots = ours[0].path_slots[: NUM_REQS * N]
    is_real = ours[0].slot_mapping[: NUM_REQS * N] >= 0
    own = rows.gather(1, (rows >= 0).sum(dim=1, keepdim=True) - 1)[:, 0]
    own_slots = slots.gather(1, (rows >= 0).sum(dim=1, keepdim=True) - 1)[:, 0]
    assert own[is_real].tolist() == is_real.nonzero()[:, 0].tolist()
    assert torch.equal(own_slots[is_real], ours[0].slot_mapping[: NUM_REQS * N][is_real])


def assert_history(buffers, state):
    """Accepted tokens and no others, where they are in the text."""
    expected = torch.zeros_like(state.sampling.history)
    for b, row in enumerate(buffers.idx_mapping[:NUM_REQS].tolist()):
        count = int(buffers.num_accepted[b])
        end = int(state.num_computed_tokens[row])
        if row >= 0:
            expected[row, end - count : end] = buffers.sampled_tokens[b, :count]
    assert torch.equal(state.sampling.history[:-1], expected[:-1])


def assert_results(buffers, state, live):
    """Verified nodes with their parents; the probabilities of all live ones."""
    columns = buffers.columns
    for b, row in enumerate(buffers.idx_mapping[:NUM_REQS].tolist()):
        n = int(columns.num_verified_nodes[b])
        assert n == max(int(buffers.num_valid[b]) - 1, 0)
        if row < 0:
            continue
        assert columns.tokens[b, :n].tolist() == state.draft_tokens[row, :n].tolist()
        assert columns.parents[b, :n].tolist() == state.draft_parents[row, :n].tolist()
        assert int((columns.probs[b] > 0).sum()) == live[row]
        probs = state.draft_probs[row, : live[row]]
        found = columns.probs[b, : live[row]].float() / CONFIDENCE_ONE
        assert torch.allclose(found, probs, 0, 1e-6)


def test_a_chain_between_wider_drafts_has_its_own_places_and_parents(device):
    """Where a step's drafts are of one kind or another: its rows have no paths."""
    shape = SHAPES[0]
    ours = make(device, shape)
    ours[1].draft_parents.fill_(10**6)  # neither written nor read
    theirs = copy.deepcopy(ours)
    what = NUM_REQS, chain(shape.path_len - 1), 0
    by_kernel(fill_round)(*ours, *what, MAX_LEN)
    fill_round_ref(*theirs, *what, MAX_LEN)
    assert_same(ours, theirs)
    Q = shape.path_len
    ids = ours[0].input_ids[: NUM_REQS * Q].view(NUM_REQS, Q)
    for buffers, _ in (ours, theirs):
        buffers.target_tokens[: NUM_REQS * Q] = ids.roll(-1, dims=1).flatten()
    launch_decision(*ours, *what, False)
    decision_ref(*theirs, *what, False)
    assert_same(ours, theirs)
    buffers = ours[0]
    accepted = int(buffers.num_accepted[1])
    assert accepted == Q - 1
    assert buffers.columns.parents[1, : Q - 1].tolist() == list(range(Q - 1))
    assert buffers.proposed_parents[1].tolist() == list(range(shape.num_nodes))
    assert (buffers.path_rows == -999).all()
    assert (buffers.moved_to == -999).all()


def assert_chains_can_follow(buffers, state, path_len):
    """What the levels of a chain start from; the rows of paths are as those of shared rounds."""
    rows = [row for row in buffers.idx_mapping[:NUM_REQS].tolist() if row >= 0]
    assert state.num_nodes[rows].tolist() == [0] * len(rows)
    assert not buffers.proposed_tokens[:NUM_REQS].any()
    chain = list(range(buffers.proposed_parents.shape[1]))
    assert buffers.proposed_parents[:NUM_REQS].tolist() == [chain] * NUM_REQS
    assert (int(buffers.draft_positions[3]), int(buffers.draft_slots[3])) == (0, -1)
    assert buffers.verify_start_loc[: NUM_REQS + 1].tolist() == [
        b * path_len for b in range(NUM_REQS + 1)
    ]


@pytest.mark.parametrize("num_cut", [0, 1])
def test_commit_rows_with_paths(device, shape, num_cut):
    """With rows for all nodes, or all but the last ones, and then for shorter paths alone."""
    N = shape.num_nodes + 1 - num_cut
    Q = min(shape.path_len, N) - num_cut
    accepted = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        ours = make(device, shape)
        fill_round_ref(*ours, NUM_REQS, DraftShape(Q - 1, 2, N - 1), 0, MAX_LEN)
        ours[0].results.fill_(77)  # left by others
        targets = torch.randint(0, 2, (NUM_REQS * N,))
        targets[torch.rand(len(targets)) < 0.1] = -2  # a marker
        ours[0].target_tokens[: NUM_REQS * N] = targets
        theirs = copy.deepcopy(ours)
        live = ours[1].num_nodes.clone()
        launch_decision(*ours, NUM_REQS, DraftShape(Q - 1, 2, N - 1), 0, False)
        decision_ref(*theirs, NUM_REQS, DraftShape(Q - 1, 2, N - 1), 0, False)
        assert_same(ours, theirs)
        assert_history(*ours)
        assert_results(*ours, live)
        for each in (ours, theirs):
            assert_chains_can_follow(*each, Q)
            of_prompts = (each[0].positions, each[0].slot_mapping, each[0].draft_input_ids)
            assert all((rows[NUM_REQS * N :] == -999).all() for rows in of_prompts)
        accepted |= set(ours[0].num_accepted[:NUM_REQS].tolist())
    assert 1 < len(accepted) <= Q or Q == 1


@pytest.mark.parametrize(
    "at_once, num_prompt_rows", [(4, 11), (64, 11), (gather_paths.AT_ONCE, 2500)]
)
def test_move_prompts(device, shape, monkeypatch, at_once, num_prompt_rows):
    """Behind paths, over rows that are read, too; then padding."""
    monkeypatch.setattr(gather_paths, "AT_ONCE", at_once)
    ours = make(device, shape, more_rows=2600)[0]
    rows = shape.drafts
    N, Q = rows.rows, rows.path_len
    num_reqs, num_padding = 2, 3
    for name in ("positions", "slot_mapping", "draft_input_ids"):
        getattr(ours, name).copy_(torch.randint(0, 9999, getattr(ours, name).shape))
    ends = torch.tensor([num_reqs * N + 4, num_reqs * N + num_prompt_rows - 1, 0])
    ours.last_token_indices[:num_reqs] = torch.arange(num_reqs) * Q
    ours.last_token_indices[num_reqs : num_reqs + 3] = ends
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    num_rows = num_reqs * Q + num_prompt_rows + num_padding
    launch_move_prompts(ours, num_reqs, rows, num_prompt_rows, num_rows)
    move_prompts_ref(theirs, num_reqs, rows, num_prompt_rows, num_rows)
    moved = slice(num_reqs * Q, num_reqs * Q + num_prompt_rows)
    was = slice(num_reqs * N, num_reqs * N + num_prompt_rows)
    for name, of_padding in (("positions", 0), ("slot_mapping", -1), ("draft_input_ids", 0)):
        mine, other, old = (getattr(each, name) for each in (ours, theirs, before))
        assert torch.equal(mine, other), name
        assert torch.equal(mine[moved], old[was]), name
        assert mine[moved.stop : num_rows].tolist() == [of_padding] * num_padding
        assert torch.equal(mine[: moved.start], old[: moved.start]), name
    assert torch.equal(ours.path_sources, theirs.path_sources)
    assert ours.path_sources[moved].tolist() == list(range(was.start, was.stop))
    assert torch.equal(ours.last_token_indices, theirs.last_token_indices)
    shift = num_reqs * (N - Q)
    assert ours.last_token_indices[:5].tolist() == [0, Q, *(ends[:2] - shift).tolist(), 0]


@pytest.mark.parametrize("G, C", [(2, 16), (3, 64)])
def test_move_slots(device, G, C):
    ours = torch.randn(5, 2, 7, G, 64, C, device=device)
    theirs, before = ours.clone(), ours.clone()
    source = torch.tensor([5 * 64 + 3, -1, 5 * 64, 4 * 64 + 63, 300], device=device)
    target = torch.tensor([0, 17, 64 + 63, 2 * 64 + 1, -1], device=device)
    by_kernel(move_slots)(ours, source, target)
    move_slots_ref(theirs, source, target)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[:, :, 1, :, 63], before[:, :, 5, :, 0])
    assert (ours != before).any(dim=(0, 1, 3, 5)).sum() == 3


@pytest.mark.slow
def test_they_compile_without_a_gpu():
    """In a process without the interpreter, for which kernels are something else."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.rounds.compile_trees"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 11
