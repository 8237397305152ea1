"""Greedy acceptance: drafts hold up to the first that is not the target's own choice."""

import itertools

import pytest
import torch

from specdec.rounds.commit import accept_equal


@pytest.mark.parametrize(
    "target, draft, num_valid, num_accepted",
    [
        ([5, 6, 7, 8], [5, 6, 7], 4, 3),
        ([5, 6, 7, 8], [5, 6, 0], 4, 2),
        ([5, 6, 7, 8], [5, 0, 7], 4, 1),  # what holds after a rejection does not count
        ([5, 6, 7, 8], [0, 6, 7], 4, 0),
        ([5, 6, 7, 8], [6, 7, 8], 4, 0),  # off by one
        ([5, 6, 7, 8], [5, 6, 7], 3, 2),  # the last draft's row is padding
        ([5, 6, 7, 8], [5, 6, 7], 1, 0),
        ([5, 6, 7, 8], [5, 6, 7], 0, 0),
        ([5], [], 1, 0),
    ],
)
def test_drafts_hold_up_to_the_first_that_differs(target, draft, num_valid, num_accepted):
    accepted_B = accept_equal(
        torch.tensor([target]), torch.tensor([draft]).long(), torch.tensor([num_valid])
    )
    assert accepted_B.tolist() == [num_accepted]


@pytest.mark.parametrize("K", [1, 2, 5])
def test_a_batch_is_decided_row_by_row(K):
    rows = list(itertools.product([0, 1], repeat=K))  # 1: the draft is the target's choice
    holds_BK = torch.tensor(rows)
    target_BQ = torch.arange(100, 101 + K).expand(len(rows), K + 1)
    draft_BK = torch.where(holds_BK == 1, target_BQ[:, :K], 7)
    for num_valid in range(K + 2):
        accepted_B = accept_equal(target_BQ, draft_BK, torch.full((len(rows),), num_valid))
        expected = [
            sum(1 for _ in itertools.takewhile(bool, row[: max(num_valid - 1, 0)])) for row in rows
        ]
        assert accepted_B.tolist() == expected
