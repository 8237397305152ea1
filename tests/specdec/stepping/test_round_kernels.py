"""kernel == twin for the kernels between the passes: integers, so they are equal to the bit."""

import copy

import pytest
import torch

from specdec.kernels.add import launch_add
from specdec.kernels.best_token import StopMask, best_token_ref, launch_tile_maxima
from specdec.kernels.linear import Sums
from specdec.requests.row_start import RowStart
from specdec.scheduling.work import PromptPart
from specdec.sizes import MAX_STOP_IDS
from specdec.stepping.buffers import BufferSizes, StepBuffers
from specdec.stepping.commit import (
    accept_and_commit,
    accept_and_commit_ref,
    commit_prompts,
    commit_prompts_ref,
    launch_accept_and_commit,
    launch_commit_prompts,
)
from specdec.stepping.fill import Extent, fill_prompts, fill_round_ref, launch_fill_round
from specdec.stepping.propose import DraftLevel, launch_propose, propose_ref
from specdec.stepping.state import RequestState

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
V, D = 200, 64
MAX_LEN = 150


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def make(device, K, num_reqs=5):
    """5 batch slots, the fourth of which is padding; poison where nothing is written."""
    sizes = BufferSizes(
        max_tokens=64,
        max_reqs=8,
        num_speculative_tokens=K,
        hidden_size=D,
        aux_width=0,
        draft_hidden_size=D,
    )
    buffers = StepBuffers(sizes, torch.float32, device)
    state = RequestState(6, K, 3, 99, device)
    for tensor in buffers.tensors().values():
        tensor.fill_(-999 if tensor.dtype == torch.int64 else torch.nan)
    for row, (length, own_k) in enumerate(
        [(5, K), (63, K), (64, 0), (MAX_LEN - 2, K), (MAX_LEN - 1, K), (7, K)]
    ):
        state.assign(row, RowStart(blocks=[10 + row, 20 + row, 30 + row], num_draft_tokens=own_k))
        state.num_computed_tokens[row] = length
    state.last_sampled_tokens.copy_(torch.arange(7) + 100)
    state.draft_tokens.copy_(torch.randint(0, 4, state.draft_tokens.shape))
    buffers.idx_mapping[:num_reqs] = torch.tensor([4, 0, 2, -1, 3], device=device)
    return buffers, state


def same(ours, theirs, num_reqs, K):
    """Buffers and state rows are equal; the scratch row does not count."""
    for (name, a), b in zip(ours[0].tensors().items(), theirs[0].tensors().values(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
    for name in ("last_sampled_tokens", "num_computed_tokens", "draft_tokens"):
        assert torch.equal(getattr(ours[1], name)[:-1], getattr(theirs[1], name)[:-1]), name


@pytest.mark.parametrize("K, Q", [(0, 1), (1, 2), (1, 1), (3, 4), (3, 1), (5, 6)])
def test_fill_round(device, K, Q):
    ours, theirs = (make(device, K) for _ in range(2))
    theirs[1].draft_tokens.copy_(ours[1].draft_tokens)
    launch_fill_round(*ours, 5, MAX_LEN, Q)
    fill_round_ref(*theirs, 5, MAX_LEN, Q)
    same(ours, theirs, 5, K)
    assert (ours[0].slot_mapping[: 5 * Q] != -999).all()
    assert (ours[0].slot_mapping[5 * Q :] == -999).all()


def decided_case(device, K, Q):
    """Rows of a round and the target's choices in front of the commit, Q rows per batch slot."""
    buffers, state = make(device, K)
    fill_round_ref(buffers, state, 5, MAX_LEN, K + 1)
    ids = buffers.input_ids[: 5 * (K + 1)].view(5, K + 1)[:, :Q].clone()
    buffers.input_ids[: 5 * Q] = ids.view(-1)
    buffers.input_ids[5 * Q :] = -999
    buffers.target_tokens[5 * Q :] = -999
    buffers.num_valid[:5].clamp_(max=Q)
    buffers.target_tokens[: 5 * Q] = torch.randint(0, 4, (5 * Q,), device=device)
    buffers.target_tokens[:Q] = torch.cat(
        [ids[0, 1:], ids[0, :1]]
    )  # one request accepts all it may
    # in padding, what an earlier round of more rows left
    buffers.pq_accepted[:5] = (torch.arange(5, device=device) * 2).clamp(max=Q - 1)
    buffers.pq_accepted[3] = 9
    return buffers, state


@pytest.mark.parametrize("is_pq", [False, True])
@pytest.mark.parametrize("K, Q", [(0, 1), (1, 2), (3, 4), (5, 6), (5, 1), (5, 3), (1, 1)])
def test_accept_and_commit(device, K, Q, is_pq):
    ours = decided_case(device, K, Q)
    theirs = copy.deepcopy(ours)
    before = ours[1].num_computed_tokens.clone()
    launch_accept_and_commit(*ours, 5, is_pq, Q)
    accept_and_commit_ref(*theirs, 5, is_pq, Q)
    same(ours, theirs, 5, K)
    buffers, state = ours
    assert (buffers.sampled_tokens[:5, Q:] == 0).all()
    assert (buffers.verified_tokens[:5, Q - 1 :] == 0).all()
    assert (buffers.draft_input_ids[5 * Q :] == -999).all()
    for b, row in enumerate([4, 0, 2, -1, 3]):
        count = int(buffers.num_accepted[b])
        assert not is_pq or count == (min(2 * b, Q - 1) if row >= 0 else 0)
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
    fill_prompts(buffers, parts, Extent(2, 6), Extent(first, first + 12))
    buffers.target_tokens[first : first + 4] = torch.tensor([40, 41, 42, 43], device=device)
    theirs = copy.deepcopy(ours)
    launch_commit_prompts(*ours, Extent(2, 6), Extent(first, first + 8))
    commit_prompts_ref(*theirs, Extent(2, 6), Extent(first, first + 8))
    same(ours, theirs, 6, K)
    assert buffers.sampled_tokens[2:4, 0].tolist() == [40, 7]
    assert state.last_sampled_tokens[[0, 2, 4]].tolist() == [40, 7, 104]
    assert state.num_computed_tokens[[0, 2, 4]].tolist() == [4, 2, MAX_LEN - 1]
    # each row embeds what follows it: the next token of the prompt, or the one that was drawn
    ids = buffers.draft_input_ids[first : first + 8].tolist()
    assert ids == [11, 12, 13, 40, 7, 1, 2, 3]


@pytest.mark.parametrize("commit", [launch_accept_and_commit, accept_and_commit_ref, None])
def test_no_draft_of_the_step_before_is_left_for_the_next(device, commit):
    buffers, state = decided_case(device, 3, 4)
    buffers.draft_tokens.fill_(77)
    if commit is None:
        buffers.target_tokens[:5] = 4
        buffers.draft_sample_slots[:20] = -1
        buffers.positions[:20] = 0
        buffers.last_token_indices[:5] = 0
        commit_prompts(buffers, state, Extent(0, 5), Extent(0, 20))
    else:
        commit(buffers, state, 5, False, 4)
    assert not buffers.draft_tokens[:5].any()  # padding too: graphs of the draft read it
    assert (buffers.draft_tokens[5:] == 77).all()


def test_seed_rows_follow_the_rows_of_the_round(device):
    for (buffers, state), Q in (
        (decided_case(device, 5, 6), 6),
        (decided_case(device, 5, 1), 1),
    ):
        buffers.target_tokens[:30] = 50  # no draft holds
        accept_and_commit(buffers, state, 5, False, Q)
        assert buffers.last_token_indices[:5].tolist() == [0, Q, 2 * Q, 0, 4 * Q]
        assert not buffers.num_accepted[:5].any()


@pytest.mark.parametrize("K, level", [(1, 0), (3, 0), (3, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("has_d2t", [False, True])
def test_propose(device, K, level, has_d2t):
    ours = make(device, K)
    fill_round_ref(*ours, 5, MAX_LEN, K + 1)
    ours[0].draft_tokens[:5] = torch.randint(0, 50, (5, K), device=device)
    theirs = copy.deepcopy(ours)
    normed, weight = torch.randn(5, D, device=device), torch.randn(V, D, device=device)
    d2t = torch.randperm(1000, device=device)[:V] if has_d2t else None
    for propose, (buffers, state) in ((launch_propose, ours), (propose_ref, theirs)):
        to = DraftLevel(buffers=buffers, state=state, level=level, d2t_W=d2t, max_model_len=MAX_LEN)
        propose(normed, weight, to)
    same(ours, theirs, 5, K)


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
    launch_add(sums, residual, out[:, :33])
    torch.testing.assert_close(out[:, :33], sums.finish(torch.float32) + residual)
    assert out[:, 33:].isnan().all()
