"""kernel == twin for what surrounds the choice of a token, and for scores that nearly tie."""

import copy
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.kernels import choose_token, jit, tl
from specdec.kernels.best_token import launch_write
from specdec.kernels.choose_token import NoiseKeys, choose_token_ref, launch_choices
from specdec.kernels.gumbel import DRAFT, TARGET, gumbel_noise, gumbel_of_all_ref
from specdec.requests.params import SamplingFlags, SamplingStart
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.sampler.accept import Decision
from specdec.sampler.count_sampled import count_sampled, count_sampled_ref
from specdec.sampler.process_logits import process_logits
from specdec.sampler.processors import process
from specdec.sampler.row_parameters import TextPositions, row_parameters, row_parameters_ref
from specdec.sampler.sampler import Sampler
from specdec.sizes import chain
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.sampler.decided import uniform_rows, without_padding

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
V, K, R = 2100, 3, 4
STARTS = [
    {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 2**63 + 5,
        "bad_words": [[4], [1, 2], [2, 2, 3], [1, 3]],
    },
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "top_k": 7, "min_p": 0.1},
    {
        "repetition_penalty": 1.6,
        "logit_bias": {3: 5.0, 2050: -2.0},
        "bad_words": [[3, 1]],
        "presence_penalty": -1.0,
    },
    {
        "allowed_token_ids": [1, 2, 3, 4, 0, 2049],
        "repetition_penalty": 0.7,
        "frequency_penalty": -0.5,
    },
]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def make_state(device):
    rng = np.random.default_rng(0)
    state = RequestState(R, chain(K), 1, 9, device, vocab_size=V)
    for row, start in enumerate(STARTS):
        sampling = SamplingStart(prompt=rng.integers(0, 5, 4).tolist(), **start)
        stops = {"min_position": 9, "stop_ids": [0, 2099]}
        start_rows(
            state, [(row, RowStart(blocks=[0], num_draft_tokens=K, sampling=sampling, **stops))]
        )
        state.num_computed_tokens[row] = 4 + row
    state.sampling.output_counts[:, :5] = torch.randint(0, 3, (R + 1, 5))
    state.sampling.output_counts[-1] = 0
    # in front of the generated tokens, what an earlier request left
    state.sampling.history[:, :9] = torch.randint(0, 5, (R + 1, 9))
    return state


def make_rows(device, state, Q):
    row_B = torch.tensor([3, 0, -1, 2, 1], device=device)
    num_valid = torch.tensor([Q, max(Q - 1, 1), 0, Q, 1], device=device)
    position_BQ = (
        state.num_computed_tokens[row_B][:, None] + torch.arange(Q, device=device)
    ).contiguous()
    return uniform_rows(
        row_B=row_B,
        token_BQ=torch.randint(0, 5, (5, Q), device=device),
        position_BQ=position_BQ,
        num_valid_B=num_valid,
    )


@pytest.mark.parametrize("Q", [1, 4])
@pytest.mark.parametrize(
    "flags",
    [
        SamplingFlags(noise=True),
        SamplingFlags(bias=True),
        SamplingFlags(penalties=True),
        SamplingFlags(bad_words=True),
        SamplingFlags(bias=True, bad_words=True, penalties=True),
    ],
)
def test_process_logits(device, Q, flags):
    ours = make_state(device)
    theirs = copy.deepcopy(ours)
    for past in range(3):
        rows = make_rows(device, ours, Q)
        logits = torch.randn(5 * Q, V + 13, device=device)[:, :V]
        logits[Q, [0, 4, 7]] = torch.nan  # ids that are forbidden, and one that is not
        expected = logits.clone()
        by_kernel(process_logits)(logits, rows, ours, flags)
        process(expected, rows, theirs, flags)
        assert torch.equal(logits.nan_to_num(9e9), expected.nan_to_num(9e9))
        assert torch.equal(ours.sampling.history[:-1], theirs.sampling.history[:-1])
        assert (logits == -torch.inf).any() or past
        for state in (ours, theirs):
            state.num_computed_tokens += 2


@pytest.mark.parametrize("apply", [by_kernel(process_logits), process])
def test_slots_of_different_lengths_have_the_bits_of_padded_ones(device, apply):
    flags = SamplingFlags(bias=True, bad_words=True, penalties=True)
    padded_state = make_state(device)
    ragged_state = copy.deepcopy(padded_state)
    padded = make_rows(device, padded_state, 4)
    ragged, kept = without_padding(padded)
    logits = torch.randn(20, V, device=device)
    ours = logits[kept].clone()
    apply(logits, padded, padded_state, flags)
    apply(ours, ragged, ragged_state, flags)
    assert len(ours) == 12
    assert torch.equal(ours, logits[kept])
    history = [each.sampling.history[:-1] for each in (padded_state, ragged_state)]
    assert torch.equal(*history)


@pytest.mark.parametrize("apply", [by_kernel(process_logits), process])
def test_a_bad_word_begins_in_what_was_generated_and_not_in_the_prompt(device, apply):
    state = RequestState(R, chain(K), 1, 9, device, vocab_size=V)
    sampling = SamplingStart(prompt=[7, 8, 1], bad_words=[[1, 2], [8, 1, 3], [1, 1, 4]])
    start_rows(state, [(0, RowStart(blocks=[0], num_draft_tokens=K, sampling=sampling))])

    def forbidden(tokens, position):
        logits, Q = torch.zeros(len(tokens), V, device=device), len(tokens)
        rows = uniform_rows(
            row_B=torch.zeros(1, dtype=torch.int64, device=device),
            token_BQ=torch.tensor([tokens], device=device),
            position_BQ=torch.arange(position, position + Q, device=device)[None],
            num_valid_B=torch.full((1,), Q, device=device),
        )
        apply(logits, rows, state, SamplingFlags(bad_words=True))
        return [row.isinf().nonzero()[:, 0].tolist() for row in logits]

    assert forbidden([1], 2) == [[]]  # the last token of the prompt, from which a chunk draws
    assert forbidden([1, 1, 9], 3) == [[2], [2, 4], []]


@pytest.mark.parametrize(
    "alone",
    [{"presence_penalty": 0.7}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.3}, {}],
)
def test_one_penalty_is_enough(device, alone):
    state = make_state(device)
    for row in range(R):
        sampling = SamplingStart(prompt=[1, 2], **alone)
        start_rows(
            state,
            [(row, RowStart(blocks=[0], num_draft_tokens=K, sampling=sampling, generated=[3, 3]))],
        )
    rows = make_rows(device, state, 4)
    logits = torch.randn(20, V, device=device)
    ours, theirs = logits.clone(), logits.clone()
    by_kernel(process_logits)(ours, rows, state, SamplingFlags(penalties=True))
    process(theirs, rows, state, SamplingFlags(penalties=True))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, logits) == (not alone)


@pytest.mark.parametrize("B", [1, 5, 200])
@pytest.mark.parametrize("has_epoch", [False, True])
def test_row_parameters(device, B, has_epoch):
    state = make_state(device)
    state_T = torch.arange(B, device=device) % (R + 1) - 1
    start_T = (torch.arange(B, device=device) - 3).clamp(min=0)
    places = TextPositions(torch.randint(0, 1000, (B,), device=device), start_T)
    for where, offset in ((places, 1), (None, 3)):
        ours = by_kernel(row_parameters)(state, state_T, where, offset, DRAFT, has_epoch)
        theirs = row_parameters_ref(state, state_T, where, offset, DRAFT, has_epoch)
        assert ours[1].stream == theirs[1].stream == DRAFT
        for a, b in zip(ours, theirs, strict=True):
            for name, one, other in zip(a._fields, a, b, strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, (
                    name
                )


def test_count_sampled(device):
    ours = make_state(device)
    theirs, before = copy.deepcopy(ours), ours.sampling.output_counts.clone()
    guarded = torch.cat([torch.zeros_like(before[:1]), before])  # row -1 lies in front of the first
    ours.sampling.output_counts = guarded[1:]
    row_B = torch.tensor([3, 0, -1, 2, 1], device=device)
    # columns of the results: four tokens, how many hold, three drafts
    results = [
        [4, 4, 4, 9, 2],
        [1, -2, 3, 4, 1],
        [5, 6, 7, 8, 3],
        [-1, 2, 3, 4, 0],
        [2099, 0, 0, 0, 0],
    ]
    results = torch.tensor([[*row, 7, 7, 7] for row in results], device=device)
    tokens, accepted = results[:, :4], results[:, 4]
    by_kernel(count_sampled)(ours, row_B, tokens, accepted)
    count_sampled_ref(theirs, row_B, tokens, accepted)
    assert torch.equal(ours.sampling.output_counts, theirs.sampling.output_counts)
    added = ours.sampling.output_counts - before
    assert added.sum() == 5
    assert (added[3, 4], added[0, 1], added[1, 2099]) == (3, 1, 1)
    assert not guarded[0].any()


@pytest.mark.parametrize(
    "spread, has_ids",
    [
        *((0.0, True), (1e-7, False)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((0.0, False), (1e-7, True), *product((1e-5, 1e-3), (False, True)))
        ),
    ],
)
def test_scores_that_nearly_tie_are_told_apart_as_by_the_twin(device, spread, has_ids):
    T, wide = 20, 5000
    ids = torch.arange(wide, device=device) if has_ids else None
    noise_keys = NoiseKeys(
        temperatures=torch.full((T,), 0.7, device=device),
        seeds=torch.randint(0, 2**32, (T, 2), device=device),
        positions=torch.arange(T, device=device),
        epochs=torch.zeros(T, dtype=torch.int64, device=device),
        stream=TARGET,
        token_ids=ids,
    )
    noise = gumbel_of_all_ref(
        noise_keys.seeds, noise_keys.positions, wide, TARGET, noise_keys.epochs
    )
    logits = -0.7 * noise + spread * torch.randn(T, wide, device=device)
    floor, out = torch.full((T,), -torch.inf, device=device), torch.full((T,), -999, device=device)
    launch_write(*launch_choices(logits, floor, noise_keys)[:2], out)
    assert torch.equal(out, choose_token_ref(logits, floor, noise_keys))


@jit
def _worst_estimate(r, IS_GPU: tl.constexpr):
    """Noise with the greatest error that gumbel_estimate may have, up or down by the draw."""
    return gumbel_noise(r) + tl.where((r & 1) == 1, 1e-4, -1e-4)


@pytest.mark.parametrize(
    "level, spread",
    [
        (0, 1e-5),
        (2**15, 0),
        *(pytest.param(0, each, marks=pytest.mark.slow) for each in (1e-6, 1e-4)),
    ],
)
def test_no_estimate_within_its_error_changes_the_token(monkeypatch, level, spread):
    """Near ties whose best is often estimated too low, and others too high.

    By the interpreter only, since a compiled kernel keeps the estimate that it was built with.
    """
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    torch.manual_seed(0)
    T, wide = 8, 8192  # tiles of 1,024
    noise_keys = NoiseKeys(
        temperatures=torch.ones(T),
        seeds=torch.randint(0, 2**32, (T, 2)),
        positions=torch.arange(T),
        epochs=torch.zeros(T, dtype=torch.int64),
        stream=TARGET,
    )
    which = (TARGET, noise_keys.epochs)
    noise = gumbel_of_all_ref(noise_keys.seeds, noise_keys.positions, wide, *which)
    logits = level - noise + spread * torch.randn(T, wide)
    floor = torch.full((T,), -torch.inf)
    monkeypatch.setattr(choose_token, "gumbel_estimate", _worst_estimate)
    out = torch.full((T,), -999)
    launch_write(*launch_choices(logits, floor, noise_keys)[:2], out)
    assert torch.equal(out, choose_token_ref(logits, floor, noise_keys))


def test_the_token_after_the_accepted_drafts_is_the_twins(device, monkeypatch):
    state = make_state(device)
    decision = Decision(
        num_accepted_B=torch.tensor([1, 0, 0, 2, 0], device=device),
        weights_BV=torch.ones(5, V, device=device),
        is_bonus_B=torch.tensor([False, True, True, False, True], device=device),
    )
    row_B = torch.tensor([3, 0, -1, 2, 1], device=device)
    positions = make_rows(device, state, 4).position_T
    buffers, drawn = SimpleNamespace(idx_mapping=row_B, positions=positions), []
    for is_kernel in (True, False):
        monkeypatch.setattr(choose_token, "use_triton", lambda _, kernel=is_kernel: kernel)
        drawn.append(Sampler(None, buffers, state, "block", None)._draw(decision, 4).tolist())
    assert drawn[0] == drawn[1]
