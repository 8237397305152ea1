"""Processors and p/q on a rank's columns: what one rank makes of all, bit for bit."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels import block_sums, choose_token
from specdec.kernels.best_token import NOT_FINITE
from specdec.kernels.choose_token import NoiseKeys
from specdec.kernels.gumbel import COIN
from specdec.requests.params import SamplingFlags
from specdec.rounds.state import RequestState
from specdec.sampler import process_logits
from specdec.sampler.accept import Drafted, block_odds, prefix_probs
from specdec.sampler.sampler import Sampler
from specdec.sizes import chain
from tests.specdec.fake_ranks import FakeRanks
from tests.specdec.sampler import test_sampling_kernels as kernels
from tests.specdec.sampler.test_tree_rows import tree_rows

MODULES = (block_sums, choose_token, process_logits)
B, K, W = 5, 3, 40


@pytest.fixture(params=["kernel", "twin"], autouse=True)
def _way(request, monkeypatch):
    torch.manual_seed(0)
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    for module in MODULES:
        monkeypatch.setattr(module, "use_triton", lambda _: request.param == "kernel")


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_paths", [False, True])
def test_processors_do_to_columns_what_they_do_to_rows(size, has_paths):
    state = kernels.make_state(torch.device("cpu"))
    state.sampling.output_counts[:, 1000:1300] = torch.randint(0, 3, (kernels.R + 1, 300))
    make = tree_rows if has_paths else lambda *case: kernels.make_rows(*case, 2)
    rows = make(torch.device("cpu"), state)
    rows.token_T[5:] = torch.randint(0, kernels.V, rows.token_T[5:].shape)  # on any rank
    logits = torch.randn(len(rows.token_T), kernels.V)
    logits[4, [0, 4, 7]] = torch.nan
    flags = SamplingFlags(bias=True, bad_words=True, penalties=True)

    def processed(x, cut):
        x = x.clone()
        process_logits.process_logits(x, rows, copy.deepcopy(state), flags, cut)
        return x

    def of_rank(rank):
        cut = rank.cut(kernels.V)
        return cut.joined(processed(logits[:, cut.ids.start : cut.ids.stop], cut), 1)

    whole = processed(logits, None)
    assert (whole != logits).any(dim=0).sum() > 100
    for found in FakeRanks(size).run(of_rank):
        assert torch.equal(found.nan_to_num(9e9), whole.nan_to_num(9e9))


def drafted_case(d2t):
    """Five slots of three drafts: likely and unlikely ones, a greedy slot, equal laws, padding."""
    V = 3 * W
    ids = torch.arange(V) if d2t is None else d2t
    N, cpu = len(ids), torch.device("cpu")
    state = RequestState(B, chain(K), 1, 9, cpu, vocab_size=V, draft_vocab_size=N)
    state.sampling.temperature[:B] = torch.tensor([1.0, 0.7, 0.0, 1.0, 1.3])
    state.sampling.seeds[:B] = torch.randint(0, 2**32, (B, 2))
    logits_BQV = 2 * torch.randn(B, K + 1, V)
    scores_BKW = logits_BQV[:, :K, ids] + torch.randn(B, K, N)
    logits_BQV[3] = -torch.inf
    logits_BQV[3][:, ids] = scores_BKW[3, [0, 1, 2, 2]]  # nothing is left to draw instead
    scores_BKW[4, 1] = -torch.inf  # a draft without a choice
    state.draft_scores[:B] = scores_BKW
    draft_BK = ids[scores_BKW.argmax(dim=-1)]
    draft_BK[2] = logits_BQV[2, :K].argmax(dim=-1)
    logits_BQV[1, 0, 50] = torch.nan
    buffers = SimpleNamespace(
        idx_mapping=torch.arange(B),
        input_ids=torch.cat([torch.zeros(B, 1, dtype=torch.int64), draft_BK], dim=1).flatten(),
        num_valid=torch.tensor([4, 4, 4, 4, 3]),
        positions=torch.arange(B * (K + 1)) + 7,
        pq_accepted=torch.full((B,), -999),
        target_tokens=torch.full((B * (K + 1),), -999),
    )
    return state, buffers, logits_BQV.flatten(0, 1)


@pytest.mark.parametrize(
    "rule, has_d2t, size",
    [
        ("block", True, 4),
        ("rejection", False, 2),
        pytest.param("block", False, 2, marks=pytest.mark.slow),
        pytest.param("rejection", True, 4, marks=pytest.mark.slow),
    ],
)
def test_p_over_q_accepts_and_draws_as_on_one_rank(rule, has_d2t, size):
    V = 3 * W
    d2t = torch.randperm(V)[:W].sort().values if has_d2t else None
    state, buffers, logits = drafted_case(d2t)
    T = len(logits)
    floor = torch.full((T,), -torch.inf)
    floor[:8] = 0.5
    keys = NoiseKeys(
        temperatures=state.sampling.temperature[:B].repeat_interleave(K + 1),
        seeds=state.sampling.seeds[:B].repeat_interleave(K + 1, dim=0),
        positions=buffers.positions,
        epochs=buffers.positions,
        stream=COIN,
    )

    def decided(x, cut):
        own = copy.deepcopy(buffers)
        sampler = Sampler(None, own, state, rule, d2t, cut)
        sampler._accept_by_pq(x, floor, K + 1, keys)
        return torch.cat([own.pq_accepted, own.target_tokens]).tolist()

    def of_rank(rank):
        cut = rank.cut(V)
        return decided(logits[:, cut.ids.start : cut.ids.stop].contiguous(), cut)

    whole = decided(logits, None)
    assert len(set(whole[:B])) > 1
    assert NOT_FINITE in whole
    assert all(found == whole for found in FakeRanks(size).run(of_rank))


def test_the_numbers_of_a_block_are_those_of_one_rank():
    V, size = 3 * W, 4
    probs = torch.rand(B, K + 1, V).pow(4)
    probs /= probs.sum(dim=-1, keepdim=True)
    drafts = torch.rand(B, K, V).pow(4)
    drafts /= drafts.sum(dim=-1, keepdim=True)
    drafted = Drafted(
        target_probs_BQV=probs,
        draft_probs_BKV=drafts,
        draft_tokens_BK=torch.randint(0, V, (B, K)),
        num_drafts_B=torch.tensor([3, 3, 2, 0, 3]),
    )

    def of_rank(rank):
        cut = rank.cut(V)
        columns = slice(cut.ids.start, cut.ids.stop)
        here = replace(
            drafted,
            target_probs_BQV=probs[..., columns].contiguous(),
            draft_probs_BKV=drafts[..., columns].contiguous(),
            cut=cut,
        )
        prefix_BQ = prefix_probs(here)
        return prefix_BQ, *block_odds(here, prefix_BQ)

    prefix_BQ = prefix_probs(drafted)
    whole = prefix_BQ, *block_odds(drafted, prefix_BQ)
    for found in FakeRanks(size).run(of_rank):
        assert all(map(torch.equal, found, whole))
