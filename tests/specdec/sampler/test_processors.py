"""Processors against their definition in numpy, row by row, over random logits and histories."""

import numpy as np
import pytest
import torch

from specdec.requests.params import SamplingFlags, SamplingStart
from specdec.rounds.state import RequestState
from specdec.rounds.upload import RowStart, start_rows
from specdec.sampler.count_sampled import count_sampled
from specdec.sampler.processors import process
from specdec.sizes import chain
from tests.specdec.sampler.decided import uniform_rows

V, Q, R = 40, 4, 5
STARTS = [
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.6, "logit_bias": {3: 5.0, 7: -2.0}},
    {
        "allowed_token_ids": [1, 2, 3, 5, 8, 13],
        "repetition_penalty": 0.7,
        "frequency_penalty": -0.5,
    },
    {"bad_words": [[4], [1, 2], [2, 2, 3], [1, 3]], "presence_penalty": -1.0},
]
MIN_TOKENS, STOPS = 6, [0, 9]


def oracle(logits, start, prompt, output, position):
    """The processed logits of one row whose history is prompt + output, in float64."""
    x = logits.astype(np.float64)
    for token, value in start.get("logit_bias", {}).items():
        x[token] += value
    if "allowed_token_ids" in start:
        x[[v for v in range(V) if v not in start["allowed_token_ids"]]] = -np.inf
    for word in start.get("bad_words", []):
        if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(output) < MIN_TOKENS:
        x[STOPS] = -np.inf
    counts = np.bincount(output, minlength=V)
    known = (np.bincount(prompt + output, minlength=V) > 0) & (x > -np.inf)
    x[known] = np.where(
        x > 0, x / start.get("repetition_penalty", 1), x * start.get("repetition_penalty", 1)
    )[known]
    x -= start.get("frequency_penalty", 0) * counts
    return x - start.get("presence_penalty", 0) * (counts > 0)


@pytest.fixture(params=range(4))
def scene(request):
    """Five requests with a history, and decided rows of each, with a slot of padding between."""
    rng = np.random.default_rng(request.param)
    state = RequestState(R, chain(Q - 1), 1, 0, torch.device("cpu"), vocab_size=V)
    prompts = [rng.integers(0, 5, 4 + r).tolist() for r in range(R)]
    for r, start in enumerate(STARTS):
        sampling = SamplingStart(prompt=prompts[r], **start)
        start_rows(
            state,
            [
                (
                    r,
                    RowStart(
                        blocks=[0],
                        num_draft_tokens=Q - 1,
                        min_position=len(prompts[r]) + MIN_TOKENS,
                        stop_ids=STOPS,
                        sampling=sampling,
                    ),
                )
            ],
        )
    return rng, state, prompts


def test_every_row_sees_its_own_history_for_three_rounds(scene):
    rng, state, prompts = scene
    order = [3, 0, -1, 4, 1, 2]
    row_B = torch.tensor(order)
    outputs = [rng.integers(0, 5, 1).tolist() for _ in range(R)]
    first = torch.tensor([[outputs[r][0] if r >= 0 else 0] for r in order])
    count_sampled(state, row_B, first, torch.zeros(len(order), dtype=torch.int64))
    for _ in range(3):
        drafts = rng.integers(0, 5, (R, Q - 1))
        valid = rng.integers(2, Q + 1, R)
        tokens = torch.tensor([[outputs[r][-1], *drafts[r]] if r >= 0 else [0] * Q for r in order])
        start = [len(prompts[r]) + len(outputs[r]) - 1 if r >= 0 else 0 for r in order]
        rows = uniform_rows(
            row_B=row_B,
            token_BQ=tokens,
            position_BQ=torch.tensor(start)[:, None] + torch.arange(Q),
            num_valid_B=torch.tensor([valid[r] if r >= 0 else 0 for r in order]),
        )
        logits = torch.from_numpy(rng.normal(0, 3, (len(order) * Q, V)).astype(np.float32))
        ours = logits.clone()
        process(ours, rows, state, SamplingFlags(bias=True, bad_words=True, penalties=True))
        for b, r in enumerate(order):
            for i in range(int(valid[r]) if r >= 0 else 0):
                history = outputs[r] + drafts[r, :i].tolist()
                row = b * Q + i
                expected = oracle(logits[row].numpy(), STARTS[r], prompts[r], history, None)
                np.testing.assert_allclose(
                    ours[row].numpy(), expected, rtol=1e-5, atol=1e-5, err_msg=f"{r} {i}"
                )
        accepted = [int(rng.integers(0, valid[r])) if r >= 0 else 0 for r in order]
        sampled = torch.from_numpy(rng.integers(0, 5, (len(order), Q)))
        for b, r in enumerate(order):
            if r >= 0:
                sampled[b, : accepted[b]] = tokens[b, 1 : accepted[b] + 1]
                outputs[r] += sampled[b, : accepted[b] + 1].tolist()
        count_sampled(state, row_B, sampled, torch.tensor(accepted))


def test_what_neighbours_need_does_not_move_a_bit_of_a_row_that_asks_for_nothing(scene):
    _, state, _ = scene
    state.min_positions.zero_()
    rows = uniform_rows(
        row_B=torch.tensor([0, 1]),
        token_BQ=torch.tensor([[1, 2, 3, 4]] * 2),
        position_BQ=torch.arange(20, 24).expand(2, Q),
        num_valid_B=torch.tensor([Q, Q]),
    )
    logits = torch.randn(2 * Q, V)
    ours = logits.clone()
    process(ours, rows, state, SamplingFlags(bias=True, bad_words=True, penalties=True))
    assert torch.equal(ours[:Q], logits[:Q])
    assert not torch.equal(ours[Q:], logits[Q:])


def test_a_minimum_without_ids_that_end_the_text_forbids_nothing(scene):
    _, state, _ = scene
    start_rows(state, [(0, RowStart(blocks=[0], num_draft_tokens=0, min_position=30))])
    rows = uniform_rows(
        row_B=torch.tensor([0]),
        token_BQ=torch.tensor([[1]]),
        position_BQ=torch.tensor([[20]]),
        num_valid_B=torch.tensor([1]),
    )
    logits = torch.zeros(1, V)
    process(logits, rows, state, SamplingFlags())
    assert not logits.any()


def test_a_row_forgets_the_request_before_it(scene):
    _, state, _ = scene
    for r in range(R):
        start_rows(state, [(r, RowStart(blocks=[0], num_draft_tokens=0))])
    rows, fresh = (
        state.sampling,
        RequestState(R, chain(Q - 1), 1, 0, torch.device("cpu"), vocab_size=V).sampling,
    )
    for name in ("floats", "integers", "bias", "in_prompt", "output_counts", "bad_lengths"):
        assert torch.equal(getattr(rows, name), getattr(fresh, name)), name
