"""Path probabilities from recent rounds: bounds, levels not drafted now, what is forgotten."""

from dataclasses import replace

import numpy as np
import pytest

from specdec.scheduling.round_history import RoundHistory, RoundOutcome

K = 4


def outcome(confidences, num_live=K, allowed=K, num_accepted=0):
    B = len(confidences)
    padded = np.full((B, K), np.nan, np.float32)  # what is not live may be anything
    padded[:, : len(confidences[0])] = confidences
    bounds = np.broadcast_to(allowed, B)
    return RoundOutcome(
        confidences=padded,
        num_live=num_live,
        num_verified=np.minimum(bounds, num_live),
        num_accepted=np.broadcast_to(num_accepted, B),
        is_sampled=np.zeros(B, bool),
        num_allowed=bounds,
    )


def history(*outcomes, capacity=100):
    made = RoundHistory(K, capacity)
    for each in outcomes:
        made.add(each)
    made.merge(100)
    return made


def test_path_probabilities_are_products_up_to_the_bound_of_the_request():
    seen = history(outcome([[0.5, 0.4, 0.2, 0.1]] * 3, allowed=[4, 2, 0]))
    assert len(seen) == 2  # a request that must not draft is no entry
    assert seen.path_probs(10)[0] == pytest.approx(
        np.array([[0.5, 0.2, 0.04, 0.004], [0.5, 0.2, 0, 0]])
    )


def test_a_level_not_drafted_now_has_the_rate_of_when_it_was():
    deep = history(*[outcome([[0.9, 0.8, 0.3]], num_live=3)] * 40, capacity=8)
    for _ in range(20):
        deep.path_probs(8)[0]
    for _ in range(8):
        deep.add(outcome([[0.6, 0.5]], num_live=2))
    deep.merge(100)
    # the third level as it was; the fourth, never drafted, as the third
    expected = np.cumprod([0.6, 0.5, 0.3, 0.3])
    assert deep.path_probs(8)[0][-1] == pytest.approx(expected, rel=0.05)


def test_a_request_whose_draft_stopped_has_the_rates_of_the_others_from_there_on():
    stopped, whole = [0.2, 0, 0, 0], [0.9, 0.8, 0.7, 0.6]
    seen = history(*[outcome([stopped, whole])] * 50)
    for _ in range(20):
        paths = seen.path_probs(100)[0]
    assert paths[0] == pytest.approx(np.cumprod([0.2, 0.8, 0.7, 0.6]), rel=0.02)
    assert paths[1] == pytest.approx(np.cumprod(whole), rel=0.02)


def test_a_mean_rate_is_that_of_drafts_whose_parents_hold():
    likely, unlikely = [0.9, 0.8], [0.1, 0.2]
    seen = history(*[outcome([likely, unlikely], num_live=2)] * 50)
    for _ in range(20):
        paths = seen.path_probs(100)[0]
    rate = (0.9 * 0.8 + 0.1 * 0.2) / (0.9 + 0.1)
    assert paths[0, 2] / paths[0, 1] == pytest.approx(rate, rel=0.02)


def test_drafts_beyond_the_bound_of_their_request_are_in_no_rate():
    shown = outcome([[0.5, 0.2], [0.5, 0.9]], num_live=2, allowed=[4, 1])
    seen = history(*[shown] * 50)
    for _ in range(20):
        paths = seen.path_probs(100)[0]
    assert paths[0] == pytest.approx([0.5, 0.1, 0.02, 0.004], rel=0.02)
    assert paths[1] == pytest.approx([0.5, 0, 0, 0])


def test_only_recent_entries_are_kept_and_a_better_calibration_applies_to_them():
    seen = history(*[outcome([[0.5] * K], num_accepted=K)] * 12, capacity=5)
    assert len(seen) == 5
    assert len(seen.path_probs(3)[0]) == 3
    assert seen.path_probs(3)[0][0, 0] == pytest.approx(0.5)
    seen.calibration.fit()
    assert seen.path_probs(3)[0][0, 0] > 0.85


def test_to_forget_keeps_only_what_is_pending():
    seen = history(*[outcome([[0.5] * K], num_accepted=K)] * 12)
    seen.calibration.fit()
    fits = seen.calibration.num_fits
    seen.add(outcome([[0.25] * K]))
    seen.forget()
    assert (len(seen), seen.num_pending) == (0, 1)
    assert seen.calibration.num_fits == fits + 1
    seen.merge(100)
    assert seen.path_probs(9)[0] == pytest.approx(np.cumprod([[0.25] * K], axis=1))


def test_only_rounds_of_one_kind_are_kept():
    seen = history(*[outcome([[0.5, 0.4, 0.2, 0.1]] * 3)] * 2)
    assert not seen.keep_kind(is_sampled=False)
    assert len(seen) == 6
    sampled = replace(outcome([[0.9, 0.8, 0.7, 0.6]] * 2), is_sampled=np.ones(2, bool))
    seen.add(sampled)
    seen.merge(100)
    assert seen.keep_kind(is_sampled=True)
    assert seen.path_probs(10)[0] == pytest.approx(np.cumprod([[0.9, 0.8, 0.7, 0.6]] * 2, axis=1))
    assert seen.keep_kind(is_sampled=False)
    assert len(seen) == 0
