"""Rows without a choice give markers, which never serve as an id; other rows stay as they are."""

import pytest
import torch

from graphs.dispatch import Dispatch
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.kernels.best_token import (
    NO_TOKEN,
    NOT_FINITE,
    best_token,
    best_token_ref,
    launch_write,
)
from specdec.kernels.choose_token import NoiseKeys, choose_token_ref, launch_choices
from specdec.kernels.support_floor import Limits, launch_support_floor, support_floor_ref
from specdec.requests.params import SamplingFlags
from specdec.rounds.commit import decision_ref, launch_decision
from specdec.rounds.prompts import Interval, commit_prompts
from specdec.rounds.propose import launch_write_nodes, propose_level
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Passes, Step
from specdec.rounds.upload import RowStart, start_rows
from specdec.sampler.accept import RULES
from specdec.sampler.sampler import Sampler
from specdec.sizes import chain
from tests.specdec.buffer_tensors import step_buffers
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.rounds.levels import level_of, propose_by_twin

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
V, D, K = 300, 64, 2
POISON = [torch.nan, torch.inf]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def poisoned(rows, bad_row, value):
    rows = rows.clone()
    rows[bad_row, 17] = value
    return rows


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("num_rows", [3, 20])
def test_a_poisoned_hidden_state_gives_its_own_row_a_marker_and_no_other(device, num_rows, value):
    x, weight = torch.randn(num_rows, D, device=device), torch.randn(V, D, device=device)
    sound, bad = best_token_ref(x, weight), poisoned(x, 1, value)
    ours = torch.full((num_rows,), -999, device=device)
    by_kernel(best_token)(bad, weight, ours)
    for tokens in (ours, best_token_ref(bad, weight)):
        assert tokens[1] == NOT_FINITE
        assert (
            tokens[torch.arange(num_rows) != 1].tolist()
            == sound[torch.arange(num_rows) != 1].tolist()
        )


@pytest.mark.parametrize("tiles", [1, 5])
def test_tiles_without_a_token_give_none(device, tiles):
    best = torch.full((tiles, 3), -torch.inf, device=device)
    best[tiles - 1, 1], best[tiles - 1, 2] = 0.5, torch.inf
    ids, out = (
        torch.arange(3 * tiles, device=device).view(tiles, 3).int(),
        torch.full((3,), -999, device=device),
    )
    launch_write(best, ids, out)
    assert out.tolist() == [NO_TOKEN, 3 * tiles - 2, NOT_FINITE]


def noise_keys_of(num_rows, device):
    return NoiseKeys(
        temperatures=torch.tensor([0.0, 0.7] * num_rows, device=device)[:num_rows],
        seeds=torch.randint(0, 2**32, (num_rows, 2), device=device),
        positions=torch.arange(num_rows, device=device),
        epochs=torch.zeros(num_rows, dtype=torch.int64, device=device),
        stream=0,
    )


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("has_floor", [False, True])
def test_poisoned_logits_give_their_own_row_a_marker_sampled_or_greedy(device, value, has_floor):
    logits, noise_keys = torch.randn(6, 5000, device=device), noise_keys_of(6, device)
    logits[4:] = -torch.inf
    bad = poisoned(poisoned(logits, 2, value), 3, value)
    ones = torch.ones(6, device=device)
    limits = Limits(
        temperatures=noise_keys.temperatures,
        log_min_p=-torch.inf * ones,
        top_k=5 * ones.long(),
        top_p=0.9 * ones,
    )
    floors = [torch.full((6,), -torch.inf, device=device)] * 2
    if has_floor:
        floors = [launch_support_floor(bad, limits), support_floor_ref(bad, limits)]
    ours = torch.full((6,), -999, device=device)
    launch_write(*launch_choices(bad, floors[0], noise_keys)[:2], ours)
    theirs = choose_token_ref(bad, floors[1], noise_keys)
    sound = choose_token_ref(
        logits, support_floor_ref(logits, limits) if has_floor else floors[1], noise_keys
    )
    for tokens in (ours, theirs):
        assert tokens.tolist() == [*sound[:2].tolist(), NOT_FINITE, NOT_FINITE, NO_TOKEN, NO_TOKEN]


def round_of(device, num_slots=3):
    buffers = step_buffers(device, 4, K, D)
    state = RequestState(4, chain(K), 1, 9, device, vocab_size=V, draft_vocab_size=V)
    for row in range(4):
        start_rows(state, [(row, RowStart(blocks=[row], num_draft_tokens=K))])
        state.num_computed_tokens[row] = 5
    buffers.sample_mapping[:num_slots] = torch.arange(num_slots, device=device)
    buffers.idx_mapping[:num_slots] = torch.arange(num_slots, device=device)
    buffers.num_valid[:num_slots] = K + 1
    return buffers, state


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("level", [0, K - 1])
@pytest.mark.parametrize("has_d2t", [False, True])
def test_a_draft_is_an_id_whatever_its_logits_are(device, value, level, has_d2t):
    x, weight = torch.randn(3, D, device=device), torch.randn(V, D, device=device)
    d2t = torch.arange(V, device=device) + 7 if has_d2t else None
    drafts = []
    for write in (by_kernel(propose_level), propose_by_twin):
        for hidden in (x, poisoned(x, 1, value)):
            buffers, state = round_of(device)
            write(hidden, weight, level_of(buffers, state, level, 100, d2t_W=d2t))
            drafts.append(buffers.proposed_tokens[:3, level].tolist())
    assert drafts[1] == drafts[3] == [drafts[0][0], 7 if has_d2t else 0, drafts[0][2]]


def test_a_draft_that_is_drawn_is_an_id_too(device):
    logits = torch.randn(3, V, device=device)
    logits[1, 5], logits[2] = torch.nan, -torch.inf
    buffers, state = round_of(device)
    floor = torch.full((3,), -torch.inf, device=device)
    choices = launch_choices(logits, floor, noise_keys_of(3, device))
    launch_write_nodes(choices, level_of(buffers, state, 0, 100))
    assert buffers.proposed_tokens[1:3, 0].tolist() == [0, 0]


@pytest.mark.parametrize("commit", [launch_decision, decision_ref])
@pytest.mark.parametrize("marker", [NO_TOKEN, NOT_FINITE])
def test_results_keep_a_marker_and_the_next_round_embeds_an_id(device, commit, marker):
    buffers, state = round_of(device)
    buffers.input_ids[:9] = torch.tensor([9, 4, 5] * 3, device=device)
    buffers.target_tokens[:9] = torch.tensor([4, 5, 6, 4, marker, 8, marker, 5, 6], device=device)
    commit(buffers, state, 3, chain(K), 0, False)
    assert buffers.num_accepted[:3].tolist() == [2, 1, 0]
    assert buffers.sampled_tokens[:3].tolist() == [[4, 5, 6], [4, marker, 0], [marker, 0, 0]]
    assert state.last_sampled_tokens[:3].tolist() == [6, 0, 0]
    assert buffers.draft_input_ids[:9].tolist() == [4, 5, 6, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("marker", [NO_TOKEN, NOT_FINITE])
def test_a_chunk_keeps_a_marker_and_what_follows_embeds_an_id(device, marker):
    buffers, state = round_of(device)
    buffers.target_tokens[:3] = torch.tensor([7, marker, 9], device=device)
    buffers.draft_input_ids[:6] = torch.arange(20, 26, device=device)
    buffers.draft_sample_slots[:6] = torch.tensor([-1, 0, -1, 1, -1, 2], device=device)
    buffers.last_token_indices[:3] = torch.tensor([1, 3, 5], device=device)
    commit_prompts(buffers, state, Interval(0, 3), Interval(0, 6))
    assert buffers.sampled_tokens[:3, 0].tolist() == [7, marker, 9]
    assert state.last_sampled_tokens[:3].tolist() == [7, 0, 9]
    assert buffers.draft_input_ids[:6].tolist() == [20, 7, 22, 0, 24, 9]


class Head:
    """A model whose logits are its hidden states."""

    def logits(self, hidden_TD):
        return hidden_TD.clone()


def decide(rule, hidden, drafts, scores, temperature):
    """Accepted counts and tokens of a round of three requests, by the shipped choice and commit."""
    buffers, state = round_of(torch.device("cpu"))
    state.sampling.temperature[:] = temperature
    buffers.hidden_states, buffers.input_ids[:9] = hidden, drafts
    buffers.positions[:9] = torch.arange(5, 8).repeat(3)
    state.draft_scores.copy_(scores)
    passes = Passes(target=Dispatch(CUDAGraphMode.NONE, BatchDescriptor(9, 3, 3)))
    flags = SamplingFlags(noise=True)
    step = Step(
        state_rows=range(3),
        shape=chain(K),
        next_shape=chain(K),
        max_seq_len=9,
        passes=passes,
        flags=flags,
    )
    Sampler(Head(), buffers, state, rule, None).choose(step)
    decision_ref(buffers, state, 3, chain(K), 0, rule != "exact")
    counts = buffers.num_accepted[:3].tolist()
    return counts, [
        row[: n + 1] for row, n in zip(buffers.sampled_tokens[:3].tolist(), counts, strict=True)
    ]


@pytest.mark.parametrize("rule", ["exact", *RULES])
@pytest.mark.parametrize("bad_row", [3, 4, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_every_rule_the_round_of_a_poisoned_request_ends_in_its_marker(
    rule, bad_row, temperature
):
    torch.manual_seed(1)
    hidden = 0.1 * torch.randn(9, V)
    hidden[torch.arange(9), torch.arange(9) + 20] = 50.0  # the choices, with and without noise
    drafts = torch.tensor([9, 20, 21, 9, 23, 24, 9, 26, 99])
    scores = 50.0 * torch.nn.functional.one_hot(
        torch.cat([drafts, torch.zeros(6).long()]).view(5, 3)[:, 1:], V
    )
    counts, tokens = decide(rule, hidden, drafts, scores, temperature)
    assert (counts, tokens[1]) == ([2, 2, 1], [23, 24, 25])
    ours, theirs = decide(rule, poisoned(hidden, bad_row, torch.nan), drafts, scores, temperature)
    assert (ours[0], ours[2], theirs[0], theirs[2]) == (counts[0], counts[2], tokens[0], tokens[2])
    assert theirs[1] == [*tokens[1][: bad_row - 3], NOT_FINITE]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("score", [torch.nan, -torch.inf])
def test_a_draft_that_was_not_drawn_is_accepted_by_the_targets_probability_alone(rule, score):
    hidden = torch.full((9, V), -torch.inf)
    hidden[:, 50], hidden[:, 0] = 0.0, -30.0
    drafts = torch.tensor([9, 0, 0] * 3)
    assert decide(rule, hidden, drafts, torch.full((5, K, V), score), 1.0) == (
        [0, 0, 0],
        [[50]] * 3,
    )
    assert decide(rule, hidden.roll(-50, 1), drafts, torch.full((5, K, V), score), 1.0)[0] == [
        2,
        2,
        2,
    ]
