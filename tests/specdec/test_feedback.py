"""What results tell the planner of a round, of chains and of trees."""

import numpy as np
import pytest

from specdec.feedback import outcome_of
from specdec.sizes import DraftShape, chain

SHAPE = DraftShape(4, 4, 4)


def described(shape, probs, parents=None, *, allowed=None, threshold=0.0, **more):
    B = len(probs)
    counts = {name: np.zeros(B, int) for name in ("num_verified", "num_accepted")}
    allowed = np.full(B, 4) if allowed is None else np.array(allowed)
    given = {"is_sampled": np.zeros(B, bool), "threshold": threshold}
    given |= counts | {name: np.array(value) for name, value in more.items()}
    return outcome_of(shape, np.asarray(probs), parents, num_allowed=allowed, **given)


def test_chains_are_their_paths():
    probs = [[0.9, 0.5, 0.2, 0.0], [0.8, 0.1, 0.0, 0.0], [0.7, 0.6, 0.5, 0.0]]
    seen = described(chain(3), probs, allowed=[4, 4, 2], num_verified=[2, 1, 2])
    assert seen.held.tolist() == [[0.9, 0.5, 0.2, 0], [0.8, 0.1, 0, 0], [0.7, 0.6, 0, 0]]
    assert seen.best.tolist() == seen.held.tolist()
    assert seen.num_run == 3
    assert seen.num_shown.tolist() == [2, 1, 2]


@pytest.mark.parametrize("parents", [None, [[0, 1, 2, 3]]])
def test_the_arrays_of_a_result_may_be_reused(parents):
    probs = np.array([[0.9, 0.5, 0.2, 0.1]])
    shape = chain(4) if parents is None else SHAPE
    seen = described(shape, probs, parents, num_on_chains=[0])
    probs[:] = 0.0
    for found in (seen, seen.chains or seen):
        assert found.held.tolist() == found.best.tolist() == [[0.9, 0.5, 0.2, 0.1]]


def test_chains_that_stopped_have_no_further_levels():
    seen = described(chain(4), [[0.9, 0.3, 0.0, 0.0]])
    assert seen.num_run == 2


@pytest.mark.parametrize("parents", [None, [[0, 1, 2, 3]]])
def test_no_probability_is_other_than_from_0_to_1(parents):
    shape = chain(4) if parents is None else SHAPE
    seen = described(shape, [[float("nan"), 2.0, -1.0, float("inf")]], parents)
    for found in (seen.held, seen.best):
        assert np.isfinite(found).all()
        assert (found >= 0).all()
        assert (found <= 1).all()


def test_levels_of_trees_have_the_sum_of_their_nodes_and_the_best_of_them():
    parents = [[0, 0, 1, 1], [0, 1, 2, 3]]
    probs = [[0.6, 0.3, 0.25, 0.125], [0.5, 0.4, 0.2, 0.1]]
    seen = described(SHAPE, probs, parents)
    assert seen.held == pytest.approx(np.array([[0.9, 0.375, 0, 0], [0.5, 0.4, 0.2, 0.1]]))
    # of the third level of the first tree no path is more probable than its least node
    assert seen.best.tolist() == [[0.6, 0.25, 0.125, 0.125], [0.5, 0.4, 0.2, 0.1]]
    assert seen.num_run == 4
    assert seen.num_shown.tolist() == [4, 4]


@pytest.mark.parametrize(
    "threshold, allowed, last",
    [
        (0.0, (4, 4, 4), 4),
        (0.19, (4, 4, 4), 3),  # level 2 has 0.3, 0.2, and at most 0.1; level 3 at most 0.1 to 0.15
        (0.21, (4, 4, 4), 2),
        (0.12, (4, 4, 4), 3),
        (0.26, (4, 4, 2), 2),  # one that may have no more has no vote
        (0.26, (4, 2, 2), 3),
        (0.55, (4, 4, 4), 1),
        (0.35, (1, 1, 1), 1),
    ],
)
def test_trees_of_a_round_stop_together(threshold, allowed, last):
    parents = [[0, 0, 1, 1], [0, 0, 1, 2], [0, 0, 0, 0]]
    probs = [[0.6, 0.4, 0.3, 0.1], [0.5, 0.3, 0.2, 0.15], [0.4, 0.3, 0.2, 0.1]]
    seen = described(SHAPE, probs, parents, allowed=allowed, threshold=threshold)
    assert seen.num_run == last
    assert seen.num_shown.tolist() == [min(last, each) for each in allowed]


def test_trees_show_what_chains_would_have_shown():
    """The chain of a tree goes from each node to its first child."""
    parents = [[0, 0, 1, 2, 4], [0, 1, 1, 3, 2]]
    probs = [[0.5, 0.4, 0.2, 0.3, 0.1], [0.5, 0.4, 0.1, 0.1, 0.05]]
    seen = described(
        DraftShape(4, 4, 5), probs, parents, num_accepted=[3, 2], num_on_chains=[0, 2]
    ).chains
    assert seen.held.tolist() == [[0.5, 0.2, 0, 0], [0.5, 0.4, 0.05, 0]]
    assert seen.num_shown.tolist() == [2, 3]
    assert seen.num_accepted.tolist() == [0, 2]
    assert described(chain(4), [[0.5, 0.4, 0.2, 0.1]], num_on_chains=[2]).chains is None


def test_nodes_deeper_than_the_request_may_have_are_no_gain():
    seen = described(SHAPE, [[0.6, 0.4, 0.3, 0.1]], [[0, 1, 2, 3]], allowed=[2])
    assert seen.held.tolist() == [[0.6, 0.4, 0, 0]]
