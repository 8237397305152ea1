"""kernel == twin for the kernels between the passes: integers, so they are equal to the bit."""

import copy

import numpy as np
import pytest
import torch

from specdec.kernels.best_token import StopMask, best_token_ref, launch_tile_maxima
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add
from specdec.rounds.buffers import CONFIDENCE_ONE
from specdec.rounds.commit import decision_ref, launch_decision
from specdec.rounds.fill import fill_round, fill_round_ref
from specdec.rounds.prompts import Interval, commit_prompts, commit_prompts_ref, fill_prompts
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.scheduling.work import PromptPart
from specdec.sizes import MAX_STOP_IDS, chain
from tests.specdec.buffer_tensors import buffer_tensors, step_buffers
from tests.specdec.kernels.by_kernel import by_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
V, D = 200, 64
MAX_LEN = 150


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def make(device, K, num_reqs=5, keeps_probs=False):
    """5 batch slots, the fourth of which is padding; poison where nothing is written."""
    buffers = step_buffers(device, 8, K, D, 64, is_adaptive=keeps_probs)
    state = RequestState(6, chain(K), 3, 99, device, has_probs=keeps_probs)
    for tensor in buffer_tensors(buffers).values():
        tensor.fill_(-999 if tensor.dtype == torch.int64 else torch.nan)
    for row, (length, own_k) in enumerate(
        [(5, K), (63, K), (64, 0), (MAX_LEN - 2, K), (MAX_LEN - 1, K), (7, K)]
    ):
        start_rows(
            state, [(row, RowStart(blocks=[10 + row, 20 + row, 30 + row], num_draft_tokens=own_k))]
        )
        state.num_computed_tokens[row] = length
        state.num_nodes[row] = max(min(own_k, MAX_LEN - 1 - length), 0)
    state.num_nodes[-1] = 77  # what padding has left
    state.draft_parents.fill_(10**6)  # those of chains are implied
    state.last_sampled_tokens.copy_(torch.arange(7) + 100)
    state.draft_tokens.copy_(torch.randint(0, 4, state.draft_tokens.shape))
    buffers.idx_mapping[:num_reqs] = torch.tensor([4, 0, 2, -1, 3], device=device)
    return buffers, state


def same(ours, theirs, num_reqs, K):
    """Buffers and state rows are equal; the scratch row does not count."""
    for (name, a), b in zip(
        buffer_tensors(ours[0]).items(), buffer_tensors(theirs[0]).values(), strict=True
    ):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
    for name in ("last_sampled_tokens", "num_computed_tokens", "draft_tokens", "num_nodes"):
        assert torch.equal(getattr(ours[1], name)[:-1], getattr(theirs[1], name)[:-1]), name


@pytest.mark.parametrize("K, Q", [(0, 1), (1, 2), (1, 1), (3, 4), (3, 1), (5, 6)])
def test_fill_round(device, K, Q):
    ours, theirs = (make(device, K) for _ in range(2))
    theirs[1].draft_tokens.copy_(ours[1].draft_tokens)
    by_kernel(fill_round)(*ours, 5, chain(Q - 1), 0, MAX_LEN)
    fill_round_ref(*theirs, 5, chain(Q - 1), 0, MAX_LEN)
    same(ours, theirs, 5, K)
    assert (ours[0].slot_mapping[: 5 * Q] != -999).all()
    assert (ours[0].slot_mapping[5 * Q :] == -999).all()
    nodes = [0, K, 0, -1, min(K, 1)]  # -1: padding
    assert ours[0].num_valid[:5].tolist() == [1 + min(count, Q - 1) for count in nodes]


def test_a_full_context_has_no_rows(device):
    for fill in (by_kernel(fill_round), fill_round_ref):
        buffers, state = make(device, 3)
        state.num_computed_tokens[0] = MAX_LEN
        fill(buffers, state, 5, chain(3), 0, MAX_LEN)
        assert buffers.num_valid[:2].tolist() == [1, 0]
        assert buffers.slot_mapping[4:8].tolist() == buffers.sample_states[4:8].tolist() == [-1] * 4


def decided_case(device, K, Q, is_pq=False):
    """Rows of a round and the target's choices in front of the commit, Q rows per batch slot."""
    buffers, state = make(device, K)
    fill_round_ref(buffers, state, 5, chain(K), 0, MAX_LEN)
    ids = buffers.input_ids[: 5 * (K + 1)].view(5, K + 1)[:, :Q].clone()
    buffers.input_ids[: 5 * Q] = ids.view(-1)
    buffers.input_ids[5 * Q :] = -999
    buffers.target_tokens[5 * Q :] = -999
    buffers.num_valid[:5].clamp_(max=Q)
    buffers.target_tokens[: 5 * Q] = torch.randint(0, 4, (5 * Q,), device=device)
    buffers.target_tokens[Q : 2 * Q] = ids[1].roll(-1)  # one request accepts all it may
    wanted = torch.tensor([3, 2, 1, 0, 9], device=device)
    accepted = torch.minimum(wanted, (buffers.num_valid[:5] - 1).clamp(min=0))
    buffers.pq_accepted[:5] = accepted
    buffers.pq_accepted[3] = 9  # in padding, what an earlier round of more rows left
    if is_pq:  # the token after the accepted drafts may be the next draft
        for b, count in enumerate(accepted.tolist()):
            following = ids[b].roll(-1)
            following[count:] = following[count].clone()
            buffers.target_tokens[b * Q : (b + 1) * Q] = following
    return buffers, state


@pytest.mark.parametrize("is_pq", [False, True])
@pytest.mark.parametrize("K, Q", [(0, 1), (1, 2), (3, 4), (5, 6), (5, 1), (5, 3), (1, 1)])
def test_commit_chains(device, K, Q, is_pq):
    ours = decided_case(device, K, Q, is_pq)
    theirs = copy.deepcopy(ours)
    before = ours[1].num_computed_tokens.clone()
    launch_decision(*ours, 5, chain(Q - 1), 0, is_pq)
    decision_ref(*theirs, 5, chain(Q - 1), 0, is_pq)
    same(ours, theirs, 5, K)
    buffers, state = ours
    assert (buffers.sampled_tokens[:5, Q:] == 0).all()
    assert (buffers.columns.tokens[:5, Q - 1 :] == 0).all()
    assert buffers.num_accepted[1] == (min(2, K, Q - 1) if is_pq else min(K, Q - 1))
    assert (buffers.draft_input_ids[5 * Q :] == -999).all()
    for b, row in enumerate([4, 0, 2, -1, 3]):
        count = int(buffers.num_accepted[b])
        assert not is_pq or count == (buffers.pq_accepted[b] if row >= 0 else 0)
        if row >= 0:
            assert state.num_computed_tokens[row] == before[row] + count + 1
            assert state.last_sampled_tokens[row] == buffers.target_tokens[b * Q + count]
            assert buffers.last_token_indices[b] == b * Q + count


@pytest.mark.parametrize("K", [0, 1, 3])
def test_commit_prompts(device, K):
    """After two slots that verify: an end, a resumed one, one that goes on, and padding."""
    ours = make(device, K)
    buffers, state = ours
    first = 2 * (K + 1)
    parts = [
        PromptPart(state_row=0, prompt=list(range(10, 14)), start=0, length=4, blocks=[0]),
        PromptPart(state_row=2, prompt=[5, 6, 7], start=1, length=1, blocks=[1], is_resumed=True),
        PromptPart(state_row=4, prompt=list(range(9)), start=0, length=3, blocks=[2]),
    ]
    fill_prompts(
        buffers, parts, Interval(2, 6), Interval(first, first + 12), np.empty((0, 3), np.int64)
    )
    buffers.target_tokens[first : first + 4] = torch.tensor([40, 41, 42, 43], device=device)
    theirs = copy.deepcopy(ours)
    by_kernel(commit_prompts)(*ours, Interval(2, 6), Interval(first, first + 8))
    commit_prompts_ref(*theirs, Interval(2, 6), Interval(first, first + 8))
    same(ours, theirs, 6, K)
    assert buffers.sampled_tokens[2:4, 0].tolist() == [40, 7]
    assert state.last_sampled_tokens[[0, 2, 4]].tolist() == [40, 7, 104]
    assert state.num_computed_tokens[[0, 2, 4]].tolist() == [4, 2, MAX_LEN - 1]
    # each row embeds what follows it: the next token of the prompt, or the one that was drawn
    ids = buffers.draft_input_ids[first : first + 8].tolist()
    assert ids == [11, 12, 13, 40, 7, 1, 2, 3]


@pytest.mark.parametrize("commit", [launch_decision, decision_ref, None])
def test_no_draft_of_the_step_before_is_left_for_the_next(device, commit):
    buffers, state = decided_case(device, 3, 4)
    buffers.proposed_tokens.fill_(77)
    if commit is None:
        buffers.target_tokens[:5] = 4
        buffers.draft_sample_slots[:20] = -1
        buffers.positions[:20] = 0
        buffers.last_token_indices[:5] = 0
        commit_prompts(buffers, state, Interval(0, 5), Interval(0, 20))
    else:
        commit(buffers, state, 5, chain(3), 0, False)
    assert not buffers.proposed_tokens[:5].any()  # padding too: graphs of the draft read it
    assert (buffers.proposed_tokens[5:] == 77).all()


@pytest.mark.parametrize("commit", [launch_decision, decision_ref])
def test_no_level_of_the_draft_writes_for_a_slot_that_has_become_padding(device, commit):
    """The levels may be padded further than the pass before them."""
    buffers, state = decided_case(device, 3, 4)
    buffers.draft_slots.fill_(77)
    buffers.draft_positions.fill_(5)
    before = state.num_computed_tokens.tolist()
    commit(buffers, state, 5, chain(3), 0, False)
    rows = buffers.sample_mapping[:5].tolist()
    assert buffers.draft_slots[:5].tolist() == [-1 if row < 0 else 77 for row in rows]
    counts = buffers.num_accepted[:5].tolist()
    expected = [0 if row < 0 else before[row] + n for row, n in zip(rows, counts, strict=True)]
    assert buffers.draft_positions[:5].tolist() == expected
    assert -1 in rows


def test_seed_rows_follow_the_rows_of_the_round(device):
    for (buffers, state), Q in (
        (decided_case(device, 5, 6), 6),
        (decided_case(device, 5, 1), 1),
    ):
        buffers.target_tokens[:30] = 50  # no draft holds
        launch_decision(buffers, state, 5, chain(Q - 1), 0, False)
        assert buffers.last_token_indices[:5].tolist() == [0, Q, 2 * Q, 0, 4 * Q]
        assert not buffers.num_accepted[:5].any()


def shared_case(device, K, shares=(1, 3, 2, 0, 1), num_rows=11):
    """Slots with these rows; those that are left of num_rows are padding."""
    buffers, state = make(device, K, keeps_probs=True)
    state.draft_probs.uniform_()
    state.num_nodes[:6] = torch.tensor([2, 3, 3, 1, 0, 3], device=device)
    state.num_draft_tokens[:6] = K
    buffers.rows_per_slot[:5] = torch.tensor(shares, device=device)
    return buffers, state, num_rows


def same_probs(ours, theirs):
    for name in ("num_nodes", "draft_probs"):
        found, expected = (getattr(each[1], name)[:-1] for each in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_fill_shared_rows(device):
    K = 3
    *ours, num_rows = shared_case(device, K)
    theirs = copy.deepcopy(ours)
    by_kernel(fill_round)(*ours, 5, chain(K), num_rows, MAX_LEN)
    fill_round_ref(*theirs, 5, chain(K), num_rows, MAX_LEN)
    same(ours, theirs, 5, K)
    buffers, state = ours
    assert buffers.verify_start_loc[:6].tolist() == [0, 1, 4, 6, 6, 7]
    assert buffers.sample_states[:11].tolist() == [4, 0, 0, 0, 2, 2, 3, -1, -1, -1, -1]
    assert buffers.sample_starts[:7].tolist() == [0, 1, 1, 1, 4, 4, 6]
    assert buffers.input_ids[1:4].tolist() == [100, *state.draft_tokens[0, :2].tolist()]
    assert buffers.positions[1:4].tolist() == [5, 6, 7]
    assert buffers.slot_mapping[7:11].tolist() == [-1] * 4
    assert (buffers.slot_mapping[11:] == -999).all()


@pytest.mark.parametrize("accepts", [False, True])
def test_commit_shared_rows(device, accepts):
    K = 3
    *ours, num_rows = shared_case(device, K)
    fill_round_ref(*ours, 5, chain(K), num_rows, MAX_LEN)
    buffers, state = ours
    buffers.target_tokens[:num_rows] = torch.randint(4, 9, (num_rows,), device=device)
    if accepts:
        buffers.target_tokens[: num_rows - 1] = buffers.input_ids[1:num_rows]
    before = state.num_computed_tokens.clone()
    buffers.draft_input_ids[7:] = -999  # no slot writes more rows than it has
    theirs = copy.deepcopy(ours)
    launch_decision(*ours, 5, chain(K), num_rows, False)
    decision_ref(*theirs, 5, chain(K), num_rows, False)
    same(ours, theirs, 5, K)
    same_probs(ours, theirs)
    accepted = [0, 2, 1, 0, 0] if accepts else [0] * 5
    assert buffers.num_accepted[:5].tolist() == accepted
    assert buffers.columns.num_verified_nodes[:5, 0].tolist() == [0, 2, 1, 0, 0]
    assert (buffers.draft_input_ids[7:] == -999).all()
    assert buffers.last_token_indices[1:3].tolist() == [1 + accepted[1], 4 + accepted[2]]
    assert state.num_computed_tokens[0] == before[0] + accepted[1] + 1
    kept = buffers.columns.probs[1].double() / CONFIDENCE_ONE
    expected = torch.where(torch.arange(K, device=device) < 2, state.draft_probs[0], 0)
    torch.testing.assert_close(kept.float(), expected, rtol=1e-5, atol=1e-6)
    assert state.num_nodes[[4, 0, 2, 3]].tolist() == [0] * 4


@pytest.mark.parametrize("rows, slots", [(1, 1), (6, 3), (70, 7)])
def test_tile_maxima_take_the_lowest_id_and_no_stop_id(device, rows, slots):
    x, weight = torch.randn(rows, D, device=device), torch.randn(V, D, device=device)
    best = best_token_ref(x, weight)
    weight[150:] = weight[:50]  # ties: the lower id wins
    stop_ids = torch.zeros(slots + 2, MAX_STOP_IDS, dtype=torch.int64, device=device)
    stop_ids[:slots] = best[:: rows // slots, None]
    mask = StopMask(
        positions=torch.arange(rows, device=device),
        states=torch.arange(slots, device=device).repeat_interleave(rows // slots),
        min_positions=torch.tensor([rows] * slots + [0, 0], device=device),
        stop_ids=stop_ids,
    )
    for chosen in (None, mask):
        maxima, ids, _ = launch_tile_maxima(x, weight, chosen)
        lowest = torch.where(maxima == maxima.amax(0), ids, 1 << 30).amin(0)
        assert torch.equal(lowest.long(), best_token_ref(x, weight, chosen))
    assert (best_token_ref(x, weight, mask)[:: rows // slots] != stop_ids[:slots, 0])[
        : slots - 1
    ].all()


@pytest.mark.parametrize("parts, has_bias", [(1, False), (3, True)])
def test_add(device, parts, has_bias):
    bias = torch.randn(33, device=device) if has_bias else None
    sums = Sums(torch.randn(parts, 5, 33, device=device), bias)
    residual, out = torch.randn(5, 33, device=device), torch.full((5, 40), torch.nan, device=device)
    by_kernel(add)(sums, residual, out[:, :33])
    torch.testing.assert_close(out[:, :33], sums.finish(torch.float32) + residual)
    assert out[:, 33:].isnan().all()
