"""What rounds of chains and of trees show the planner."""

import numpy as np
import pytest

from specdec.scheduling.outcomes import RoundOutcome, shown_by_chains, shown_by_trees
from specdec.sizes import DraftShape, chain

SHAPE = DraftShape(4, 4, 4)


def outcome(shape, probs, parents=(), *, allowed=None, **more):
    B = len(probs)
    counts = {name: np.zeros(B, int) for name in ("num_verified", "num_accepted", "num_on_chains")}
    given = counts | {name: np.array(value) for name, value in more.items()}
    allowed = np.full(B, 4) if allowed is None else np.array(allowed)
    return RoundOutcome(
        shape=shape,
        probs=np.asarray(probs),
        parents=parents,
        num_allowed=allowed,
        is_sampled=np.zeros(B, bool),
        **given,
    )


def described(shape, probs, parents=(), **more):
    return in_chains_or_trees([outcome(shape, probs, parents, **more)])[0]


def in_chains_or_trees(rounds):
    """What they showed, and what chains would have."""
    if rounds[0].shape.is_wide:
        return shown_by_trees(rounds, num_levels=4)
    return shown_by_chains(rounds), None


def test_chains_are_their_paths():
    probs = [[0.9, 0.5, 0.2, 0.0], [0.8, 0.1, 0.0, 0.0], [0.7, 0.6, 0.5, 0.0]]
    seen = described(chain(3), probs, allowed=[4, 4, 2], num_verified=[2, 1, 2])
    assert seen.held.tolist() == [[0.9, 0.5, 0.2, 0], [0.8, 0.1, 0, 0], [0.7, 0.6, 0, 0]]
    assert seen.best.tolist() == seen.held.tolist()
    assert seen.num_run.tolist() == [3, 3, 3]
    assert seen.num_shown.tolist() == [2, 1, 2]


def test_chains_that_stopped_have_no_further_levels():
    seen = described(chain(4), [[0.9, 0.3, 0.0, 0.0]])
    assert seen.num_run.tolist() == [2]


@pytest.mark.parametrize("parents", [(), [[0, 1, 2, 3]]])
def test_no_probability_is_other_than_from_0_to_1(parents):
    shape = SHAPE if parents else chain(4)
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
    assert seen.num_run.tolist() == [4, 4]
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
    assert set(seen.num_run) == {last}
    assert seen.num_shown.tolist() == [min(last, each) for each in allowed]


def test_trees_show_what_chains_would_have_shown():
    """The chain of a tree goes from each node to its first child."""
    parents = [[0, 0, 1, 2, 4], [0, 1, 1, 3, 2]]
    probs = [[0.5, 0.4, 0.2, 0.3, 0.1], [0.5, 0.4, 0.1, 0.1, 0.05]]
    shape = DraftShape(4, 4, 5)
    of_round = outcome(shape, probs, parents, num_accepted=[3, 2], num_on_chains=[0, 2])
    _, seen = in_chains_or_trees([of_round])
    assert seen.held.tolist() == [[0.5, 0.2, 0, 0], [0.5, 0.4, 0.05, 0]]
    assert seen.num_shown.tolist() == [2, 3]
    assert seen.num_accepted.tolist() == [0, 2]


@pytest.mark.parametrize("is_tree", [False, True])
def test_rounds_described_together_show_what_each_shows_alone(is_tree):
    """Each has requests, levels, a threshold and trees of its own, some without a node."""
    random, rounds = np.random.default_rng(0), []
    for B in (1, 3, 2, 5):
        counts = random.integers(0, 8, B)
        probs = np.sort(random.random((B, 7)))[:, ::-1] * (np.arange(7) < counts[:, None])
        parents = [[int(random.integers(0, min(i + 1, 3))) for i in range(n)] for n in counts]
        shape = DraftShape(4, 4, 7) if is_tree else chain(B % 4 + 1)
        probs = probs if is_tree else probs[:, :4]
        more = {"allowed": random.integers(0, 5, B), "threshold": 0.2 * (B % 3)}
        more |= {"num_verified": counts, "num_accepted": counts // 2, "num_on_chains": counts // 3}
        rounds.append(outcome(shape, probs, parents if is_tree else (), **more))
    together = in_chains_or_trees(rounds)
    alone = [in_chains_or_trees([each]) for each in rounds]
    for i, seen in enumerate(together[: 1 + is_tree]):
        for field in ("held", "best", "num_run", "num_shown", "num_accepted", "num_allowed"):
            joined = np.concatenate([getattr(each[i], field) for each in alone])
            assert np.array_equal(getattr(seen, field), joined), field


def test_a_request_that_must_not_draft_shows_nothing():
    seen = described(chain(4), [[0.5, 0.4, 0.2, 0.1]] * 3, allowed=[4, 2, 0])
    assert seen.held.tolist() == [[0.5, 0.4, 0.2, 0.1], [0.5, 0.4, 0, 0]]
    assert seen.num_allowed.tolist() == [4, 2]


def test_nodes_deeper_than_the_request_may_have_are_no_gain():
    of_round = outcome(SHAPE, [[0.6, 0.4, 0.3, 0.1]], [[0, 1, 2, 3]], allowed=[2])
    for seen in in_chains_or_trees([of_round]):
        assert seen.held.tolist() == [[0.6, 0.4, 0, 0]]
        assert seen.num_shown.tolist() == [2]
