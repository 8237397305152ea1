"""Rates of recent rounds: bounds, levels not drafted, factors, and what fades."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.scheduling.gains import GainCurve
from specdec.scheduling.history import Histories, ShapeHistory
from specdec.scheduling.outcomes import RoundOutcome, Shown
from specdec.sizes import DraftShape, chain

K = 4


def shown(rates, num_run=K, allowed=K, num_accepted=0, num_shown=None, is_sampled=False):
    """What a round of chains showed that say these rates; all drafts were verified."""
    B = len(rates)
    padded = np.zeros((B, K))
    padded[:, : len(rates[0])] = rates
    bounds = np.broadcast_to(allowed, B)
    held = padded.cumprod(axis=1) * (np.arange(K) < bounds[:, None])
    return Shown(
        held=held,
        best=held,
        num_run=np.full(B, num_run),
        num_shown=np.minimum(bounds, num_run if num_shown is None else num_shown),
        num_accepted=np.broadcast_to(num_accepted, B),
        num_allowed=bounds,
        is_sampled=np.full(B, is_sampled),
    )


def history(*rounds, capacity=100, is_calibrated=True):
    made = ShapeHistory(K, capacity, is_calibrated)
    for each in rounds:
        made.add(each, made.factors.values if is_calibrated else None)
    return made


def paths(seen, kind=None):
    """[S, K], the oldest first."""
    return seen.sample(kind, 1).held[:, 0]


def unseen(rates, **given):
    return shown(rates, num_shown=0, **given)


def test_paths_end_at_the_bound_of_the_request():
    seen = history(unseen([[0.5, 0.4, 0.2, 0.1]] * 2, allowed=[4, 2]))
    assert seen.num_known(None) == 2
    assert paths(seen) == pytest.approx(np.array([[0.5, 0.2, 0.04, 0.004], [0.5, 0.2, 0, 0]]))


def test_a_level_not_drafted_now_has_the_rate_of_when_it_was():
    seen = history(*[unseen([[0.9, 0.8, 0.3]], num_run=3)] * 40, capacity=8)
    for _ in range(20):
        paths(seen)
    for _ in range(8):
        seen.add(unseen([[0.6, 0.5]], num_run=2))
    # the third level as it was; the fourth, never drafted, as the third
    assert paths(seen)[-1] == pytest.approx(np.cumprod([0.6, 0.5, 0.3, 0.3]), rel=0.05)


def test_a_mean_rate_is_that_of_drafts_whose_parents_hold():
    seen = history(*[unseen([[0.9, 0.8], [0.1, 0.2]], num_run=2)] * 50)
    for _ in range(20):
        found = paths(seen)
    rate = (0.9 * 0.8 + 0.1 * 0.2) / (0.9 + 0.1)
    assert found[0, 2] / found[0, 1] == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_nodes_of_probability_0_and_sure_ones_leave_gains_finite(is_calibrated):
    """0 / 0 was a rate once: a node below the least probability that results can tell."""
    of_all = shown([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1e-30, 1.0, 1.0, 1.0]])
    seen = history(*[of_all] * 5, is_calibrated=is_calibrated)
    sample = seen.sample(None, 3)
    for threshold in (0.0, 0.2):
        curve = GainCurve(sample, threshold)
        assert np.isfinite(curve.means).all()
        assert np.isfinite(curve.levels_run).all()
        assert np.isfinite(curve.gains(K, np.arange(12), 3)).all()
    assert np.isfinite(seen.factors.values).all()


@pytest.mark.parametrize("said, holds", [(0.15, 0.4), (0.9, 0.5), (0.65, 0.02), (0.4, 0.4)])
def test_as_many_are_expected_as_hold(said, holds):
    """Of chains the device multiplies by the factor, which is then in what they say."""
    for is_calibrated in (True, False):
        seen, rng = ShapeHistory(K, 512, is_calibrated), np.random.default_rng(0)
        for _ in range(60):
            held = (rng.random((32, K)) < holds).cumprod(axis=1).sum(axis=1)
            odds = said / (1 - said) * (seen.factors.values[0, 0] if is_calibrated else 1)
            rate = odds / (1 + odds)
            seen.age(1, 0)
            of_round = shown(np.full((32, 1), rate), num_run=1, num_accepted=np.minimum(held, 1))
            seen.add(of_round, seen.factors.values if is_calibrated else None)
        assert paths(seen)[:, 0].mean() == pytest.approx(holds, abs=0.05)
        factor = holds / (1 - holds) / (said / (1 - said))
        assert seen.factors.values[0, 0] == pytest.approx(factor, rel=0.3, abs=0.02)
        assert (seen.factors.values[1] == 1).all()


def test_a_draft_that_changed_moves_its_factor_once():
    """What it showed of old was counted after the move too: 3 of 64 became 2 of 64, or 9."""
    seen, found = ShapeHistory(K, 512, is_calibrated=False), []
    for num_held in (32,) * 4 + (3,) * 6:
        of_round = shown([[0.5]] * 64, num_run=1, num_accepted=np.arange(64) < num_held)
        seen.age(8, 0)
        seen.add(of_round)
        found.append(paths(seen)[-1, 0])
    assert found[:4] == pytest.approx([1 / 2] * 4)
    assert found[5:] == pytest.approx([3 / 64] * 5, abs=0.01)


def test_the_largest_factor_returns_to_1_once_nothing_is_known():
    """It became the smallest one: in float32 its odds were infinite."""
    seen = history(*[shown([[2**-26]] * 64, num_run=1, num_accepted=1)] * 40, is_calibrated=False)
    assert seen.factors.values[0, 0] == 2**24
    seen.age(1, 10**5)
    seen.add(shown([[0.5]] * 8, num_run=1, is_sampled=True))
    assert seen.factors.values[0, 0] == pytest.approx(1, rel=1e-3)


def test_a_level_is_judged_where_all_before_it_held():
    """The second level always holds after the first, which it does in every second round."""
    rates, held = [[0.5, 0.5]] * 2, [0, 2]
    seen = history(*[shown(rates, num_run=2, num_accepted=held)] * 40)
    first, second = seen.factors.values[0, :2]
    assert first == pytest.approx(1, rel=0.1)
    assert second > 4


def test_drafts_are_judged_by_the_factors_that_they_had():
    """Trees that are taken in before chains move the factors, but not those of these chains."""
    histories, none = Histories(1, 100), np.zeros(8, int)
    counts = {"num_verified": none + 2, "num_accepted": none, "num_allowed": none + 1}
    given = counts | {"probs": np.full((8, 2), 0.5), "is_sampled": none > 0}
    of_trees = {"parents": [[0, 0]] * 8, "num_on_chains": none}
    trees = RoundOutcome(shape=DraftShape(1, 2, 2), **given, **of_trees)
    chains = RoundOutcome(shape=chain(1), **given | {"probs": np.full((8, 1), 0.5)})
    histories.add([trees, chains])
    assert histories.chains.factors.values[0, 0] < 0.2
    found = paths(histories.chains)[:, 0]
    assert found == pytest.approx(np.full(16, found[0]))


def test_kinds_of_requests_have_factors_and_entries_of_their_own():
    seen = ShapeHistory(K, 100, is_calibrated=False)
    for _ in range(20):
        for of_round in (
            shown([[0.5]] * 2, num_run=1, num_accepted=1),
            shown([[0.5]] * 1, num_run=1, num_accepted=0, is_sampled=True),
        ):
            seen.add(of_round)
    assert seen.factors.values[0, 0] > 2
    assert seen.factors.values[1, 0] < 0.5
    assert [seen.num_known(kind) for kind in (0, 1, None)] == [40, 20, 60]
    assert paths(seen, 0)[:, 0].mean() > 2 * paths(seen, 1)[:, 0].mean()


def test_what_is_new_outweighs_what_has_aged():
    seen = history(*[shown([[0.6]] * 8, num_run=1)] * 20, capacity=256, is_calibrated=False)
    assert paths(seen)[:, 0].mean() < 0.05
    before = seen.factors.values[0, 0]
    seen.age(0, 32)
    assert seen.factors.values[0, 0] == before, "that nothing was drafted shows nothing"
    some_held = [1, 1, 1, 1, 1, 0, 0, 0]
    for _ in range(2):
        of_round = shown([[0.6]] * 8, num_run=1, num_accepted=some_held)
        seen.add(of_round)
    assert GainCurve(seen.sample(None, 1), 0.0).means[0] > 0.2


def test_rounds_without_end_leave_weights_that_can_be_divided_by():
    seen = history(shown([[0.6]] * 8, num_run=1))
    for _ in range(100):
        seen.age(0, 10**4)
    assert np.isfinite(GainCurve(seen.sample(None, 1), 0.0).means).all()


def test_trees_stop_by_the_drafts_own_best_paths():
    """The sum of a level is calibrated, the vote is what the device sees."""
    of_round = shown([[0.9, 0.9, 0.9, 0.9]] * 4, num_accepted=0)
    best = np.full((4, K), 0.25)
    seen = ShapeHistory(K, 100, is_calibrated=False)
    for _ in range(10):
        seen.add(replace(of_round, best=best))
    sample = seen.sample(None, 4)
    assert sample.held[0, 0, 0] < 0.2
    assert GainCurve(sample, 0.2).levels_run[-1] == pytest.approx(K)
    assert GainCurve(sample, 0.3).levels_run[-1] == pytest.approx(1)
