"""The walk: nodes hold up to the first that is not the target's own choice."""

import itertools

import pytest
import torch

from specdec.rounds.commit import walk


def walked(targets, tokens, parents, num_valid, most=9, path_len=None):
    """The rows on the path of one request. parents: of nodes; a chain's are the rows before."""
    parents = range(len(tokens) - 1) if parents is None else parents
    is_node = [0 < i < num_valid for i in range(len(tokens))]
    above = [parent if real else -2 for parent, real in zip([0, *parents], is_node, strict=True)]
    rows = (torch.tensor([each]) for each in (targets, tokens, above))
    path = walk(*rows, torch.tensor([most]), path_len or len(tokens))[0].tolist()
    return [row for row in path if row >= 0]


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
def test_drafts_of_a_chain_hold_up_to_the_first_that_differs(
    target, draft, num_valid, num_accepted
):
    expected = list(range(num_accepted + 1))
    assert walked(target, [9, *draft], None, num_valid) == expected
    for most in range(5):  # where p/q has accepted fewer
        assert walked(target, [9, *draft], None, num_valid, most) == expected[: most + 1]


@pytest.mark.parametrize("K", [1, 2, 5])
def test_a_batch_is_decided_row_by_row(K):
    rows = list(itertools.product([0, 1], repeat=K))  # 1: the draft is the target's choice
    holds_BK = torch.tensor(rows)
    target_BQ = torch.arange(100, 101 + K).repeat(len(rows), 1)
    draft_BK = torch.where(holds_BK == 1, target_BQ[:, :K], 7)
    token_BQ = torch.cat([target_BQ[:, :1], draft_BK], dim=1)
    i_Q = torch.arange(K + 1)
    for num_valid in range(K + 2):
        parent_BQ = torch.where((i_Q > 0) & (i_Q < num_valid), i_Q - 1, -2).expand_as(token_BQ)
        path_BQ = walk(target_BQ, token_BQ, parent_BQ, torch.full((len(rows),), K), K + 1)
        expected = [
            sum(1 for _ in itertools.takewhile(bool, row[: max(num_valid - 1, 0)])) for row in rows
        ]
        assert ((path_BQ >= 0).sum(dim=1) - 1).tolist() == expected


def test_the_walk_follows_parents():
    parents, tokens = [0, 1, 0, 3], [9, 5, 6, 7, 6]
    assert walked([7, 0, 0, 6, 0], tokens, parents, 5, path_len=3) == [0, 3, 4]
    assert walked([7, 0, 0, 6, 0], tokens, parents, 5, path_len=2) == [0, 3]
    assert walked([5, 7, 0, 6, 0], tokens, parents, 5, path_len=3) == [0, 1]
    assert walked([6, 6, 0, 6, 0], tokens, parents, 5, path_len=3) == [0]  # of another branch
    assert walked([-1, 6, 0, 6, 0], tokens, parents, 5, path_len=3) == [0]
    assert walked([7, 0, 0, 6, 0], tokens, parents, 4, path_len=3) == [0, 3]  # padding
    assert walked([7, 0, 0, 6, 0], tokens, parents, 3, path_len=3) == [0]
