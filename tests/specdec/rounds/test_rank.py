"""The best of scores, log softmax row by row, kept nodes with their ancestors."""

import math

import pytest
import torch

from specdec.rounds.rank import ROOT, best, depths, kept_nodes, log_probs, perturbed

INF = math.inf


def test_the_first_of_equal_scores_is_the_better_and_nan_the_worst():
    scores = torch.tensor([[0.0, -0.0, -1.0, 2.0, 2.0, math.nan, -INF]])
    assert best(scores, 7).tolist() == [[3, 4, 0, 1, 2, 5, 6]]
    assert best(torch.tensor([[INF, math.nan, 1e-45, -1e-45, INF]]), 4).tolist() == [[0, 4, 2, 3]]
    assert best(torch.tensor([[-0.0, 0.0, -0.0]]), 3).tolist() == [[0, 1, 2]]


def test_best_is_a_stable_descending_sort():
    scores = torch.randint(-3, 3, (20, 33)).float()
    expected = scores.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(best(scores, 33), expected)
    assert torch.equal(best(scores, 5), expected[:, :5])


@pytest.mark.parametrize("width", [1, 7, 1024, 4099])
def test_a_row_of_log_probs_depends_on_nothing_but_the_row(width):
    torch.manual_seed(0)
    scores = 5 * torch.randn(9, width)
    shares = log_probs(scores)
    for x in range(9):
        assert torch.equal(log_probs(scores[x : x + 1])[0], shares[x])
    assert shares.max() <= 0
    assert torch.allclose(shares, scores.double().log_softmax(-1).float(), 0, 1e-5)


def test_noise_is_shared_by_the_rows_of_a_request_and_greedy_rows_have_none():
    logits = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [0.0, 1.0]])
    noise = torch.tensor([[0.5, -0.5], [4.0, 8.0]])
    temperature = torch.tensor([2.0, 2.0, 0.0, 0.0])
    floor = torch.tensor([0.75, -INF, 9.0, 9.0])
    found = perturbed(logits, floor, temperature, noise)
    assert found.tolist() == [[-INF, 1.0], [4.0, -2.0], [0.5, 0.25], [0.0, 1.0]]


def test_the_kept_nodes_bring_their_ancestors():
    # two children of the root, then two each of them
    scores = torch.tensor([[-1.0, -2.0, -1.0, -3.0, -2.0, -2.5]])
    places = torch.tensor([[ROOT, ROOT, 0, 0, 1, 1]])
    kept, parents = kept_nodes(scores, places, 4)
    assert kept.tolist() == [[0, 2, 1, 4]]
    assert parents.tolist() == [[0, 1, 0, 3]]
    assert depths(kept, 2).tolist() == [[1, 2, 1, 2]]
