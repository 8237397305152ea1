"""The candidates of rows: by kernels what the twin finds, in order, and what is added to them."""

import pytest
import torch

from specdec.kernels.best_children import Perturbation
from specdec.kernels.choose_token import NoiseKeys
from specdec.rounds import candidates
from specdec.rounds.candidates import (
    best_candidates,
    lanes_ref,
    launch_lanes,
    launch_markov_maxima,
    of_all_ids,
)
from tests.specdec.kernels.by_kernel import by_kernel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def noise_of(X, device):
    """Rows that are greedy and rows that are not, some with a floor."""
    temperatures = torch.tensor([0.0, 0.7, 1.3, 0.5] * X, device=device)[:X]
    floors = torch.tensor([-torch.inf, -torch.inf, 0.5, 1.0] * X, device=device)[:X]
    seeds = torch.arange(2 * X, device=device).view(X, 2)
    positions, epochs = torch.arange(X, device=device) + 7, torch.zeros(X, device=device).long()
    return Perturbation(floors, NoiseKeys(temperatures, seeds, positions, epochs, 0))


@pytest.mark.parametrize(
    "X, W, k, is_drawn", [(2, 64, 5, False), (3, 1100, 16, True), (4, 100, 1, True)]
)
def test_candidates_are_the_best_tokens_in_order(device, X, W, k, is_drawn):
    """Of no more ids than there are lanes."""
    logits = torch.randn(X, W, device=device)
    logits[:, 40:50] = logits[:, 20:30] = 2.5  # equal ones, of more tiles than one
    logits[:, -10:] = 2.5
    noise = noise_of(X, device) if is_drawn else None
    scores, ids = best_candidates(logits, k, noise)
    found, found_ids = by_kernel(best_candidates)(logits, k, noise)
    assert scores.shape == ids.shape == (k, X)
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found, scores, atol=4e-4, rtol=1e-5)
    for x in range(X):
        if is_drawn and x % 4:
            assert (logits[x, ids[:, x].long()] != scores[:, x]).all()
            continue
        order = sorted(range(W), key=lambda id, x=x: (-float(logits[x, id]), id))
        assert ids[:, x].tolist() == order[:k]
    rows = of_all_ids(scores, ids, W)
    assert torch.equal(rows.isfinite().sum(1), torch.full((X,), k, device=device))
    assert torch.equal(rows.gather(1, ids.t().long()), scores.t())


@pytest.mark.parametrize("X, W, is_drawn", [(3, 1000, True), (5, 200, False), (2, 60, True)])
def test_a_markov_head_adds_to_the_best_of_every_lane(device, X, W, is_drawn, monkeypatch):
    """Of few rows in parts of the vocabulary, of many, and of fewer ids than lanes."""
    monkeypatch.setattr(candidates, "LANES", 128)
    monkeypatch.setattr(candidates, "PROGRAMS", 9)
    logits, noise = torch.randn(X, W, device=device), noise_of(X, device) if is_drawn else None
    logits[:, 5::128] = 4.0  # equal ones of a lane
    logits[0, 7] = torch.nan
    feature = torch.randn(2 * X, 24, device=device)[::2]
    after = torch.randn(W, 24, device=device)
    logits[0, 20] = logits[0, 24] = 60.0  # equal ones of a tile, of a greedy row
    after[24] = after[20]
    scores = lanes_ref(logits, noise)
    assert scores.isfinite().sum(1).max() <= 128
    expected = scores + feature @ after.t()
    keys = launch_lanes(logits, noise)
    assert (keys.shape[1] > 1) == (X == 3)
    best, ids, sums = launch_markov_maxima(keys, feature, after, True)
    assert best.shape == ids.shape == sums.shape == (4, X)
    torch.testing.assert_close(best.amax(0), expected.amax(1), atol=5e-4, rtol=1e-5)
    found = ids.gather(0, best.argmax(0)[None])[0]
    assert torch.equal(found.long(), expected.argmax(1))
    top = best.amax(0)
    powers = torch.where(best > -torch.inf, sums * (best - top).exp(), 0)
    torch.testing.assert_close(
        powers.sum(0), (expected - top[:, None]).exp().sum(1), atol=1e-3, rtol=1e-3
    )
    assert launch_markov_maxima(keys, feature, after, False).sums is None


def test_rows_without_numbers_have_candidates_all_the_same(device):
    logits = torch.full((2, 40), torch.nan, device=device)
    logits[1, :3] = torch.tensor([1.0, -torch.inf, 2.0])
    for by in (by_kernel(best_candidates), best_candidates):
        scores, ids = by(logits, 5, None)
        assert ids[:2, 1].tolist() == [2, 0]
        assert scores[:2, 1].tolist() == [2.0, 1.0]
        assert not (scores[:, 0] > -torch.inf).any()
        rows = of_all_ids(scores.where(~scores.isnan(), -torch.inf), ids, 40)
        assert rows[1].isfinite().nonzero().flatten().tolist() == [0, 2]
        assert (rows[0] == -torch.inf).all()
    last = torch.tensor([[3.0], [-torch.inf]], device=device)
    ids = torch.tensor([[39], [1 << 30]], dtype=torch.int32, device=device)
    assert of_all_ids(last, ids, 40)[0, 39] == 3.0
