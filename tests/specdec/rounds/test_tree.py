"""Paths of nodes, and the walk from the root."""

import torch

from specdec.rounds.tree import paths, walk


def test_paths_and_the_walk_follow_parents():
    parents = torch.tensor([[0, 0, 1, 0, 3]])
    depths = torch.tensor([[0, 1, 2, 1, 2]])
    assert paths(parents, depths, 3).tolist() == [
        [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 3, -1, -1], [0, 3, 4, -1]]
    ]
    tokens = torch.tensor([[9, 5, 6, 7, 6]])
    is_node = torch.tensor([[False, True, True, True, True]])

    def walked(*target):
        return walk(torch.tensor([target]), tokens, parents, is_node, 2).tolist()[0]

    assert walked(7, 0, 0, 6, 0) == [0, 3, 4]
    assert walked(5, 7, 0, 6, 0) == [0, 1, -1]
    assert walked(6, 6, 0, 6, 0) == [0, -1, -1]
    assert walked(-1, 6, 0, 6, 0) == [0, -1, -1]
    is_node[0, 3] = False  # padding
    assert walked(7, 0, 0, 6, 0) == [0, -1, -1]
