"""The host's view of a tree, and what a round says of it."""

from specdec.requests.draft_tree import depths, leaf_paths, path_to
from specdec.requests.stats import RoundRecord, SpeculationStats

PARENTS = [0, 0, 1, 3, 1, 2]


def test_depths_and_paths_follow_the_parents():
    assert depths(PARENTS) == [0, 1, 1, 2, 3, 2, 2]
    assert path_to(4, PARENTS) == [0, 1, 3, 4]
    assert leaf_paths(PARENTS, 3) == [[0, 1, 3, 4], [0, 1, 5], [0, 2, 6]]


def test_deeper_levels_than_asked_for_are_left_out():
    assert leaf_paths(PARENTS, 2) == [[0, 1, 3], [0, 1, 5], [0, 2, 6]]
    assert leaf_paths(PARENTS, 1) == [[0, 1], [0, 2]]
    assert leaf_paths(PARENTS, 0) == leaf_paths([], 4) == [[0]]


def test_statistics_count_nodes_and_go_by_levels():
    stats = SpeculationStats()
    for accepted in (3, 1):
        stats.add_round(RoundRecord((7, 8, 9, 7, 8, 9), accepted, 5, tuple(PARENTS)))
    stats.add_round(RoundRecord((), 0, 5))
    assert stats.num_drafted_tokens == 12
    assert stats.num_accepted_per_position == [2, 1, 1]
    assert SpeculationStats.merged([stats, stats]).num_levels == [3, 3, 0] * 2
