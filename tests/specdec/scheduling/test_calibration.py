"""The fit finds the logistic that made the data, and stays finite and monotone whatever it sees."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from specdec.scheduling.calibration import LEAST_SLOPE, PRIOR, Calibration, fit_logistic, logit


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def observe(calibration, confidences, holds, is_sampled=None, window=10**6):
    """Chains of which every draft was verified."""
    count = np.cumprod(holds, axis=1).sum(axis=1)
    calibration.add(
        confidences,
        np.full(len(holds), holds.shape[1]),
        count,
        np.zeros(len(holds), bool) if is_sampled is None else is_sampled,
        window,
    )


def calibration_error(said, held):
    """Mean distance of said and true rates over ten bins of equal size."""
    bins = np.array_split(np.argsort(said), 10)
    return np.mean([abs(said[each].mean() - held[each].mean()) for each in bins])


@pytest.mark.parametrize("intercept, slope", [(0.0, 1.0), (1.4, 0.9), (-1.0, 0.5), (0.5, 2.0)])
def test_a_known_logistic_is_recovered(intercept, slope):
    rng = np.random.default_rng(1)
    calibration = Calibration(3)
    said = sigmoid(rng.normal(-0.5, 1.5, size=(24000, 3)))
    truth = sigmoid(intercept + slope * logit(said))
    observe(calibration, said, rng.random(truth.shape) < truth)
    calibration.fit()
    conditionals = calibration.conditionals(said, np.zeros(len(said), bool))
    for level in range(3):
        assert calibration.coefficients[0, level] == pytest.approx((intercept, slope), abs=0.2)
        held = rng.random(len(truth)) < truth[:, level]
        assert calibration_error(conditionals[:, level], held) < 0.03
        if (intercept, slope) != (0.0, 1.0):
            assert calibration_error(said[:, level], held) > 0.06  # the measure sees a bad one


def test_a_draft_that_says_15_percent_where_40_hold_is_corrected():
    rng = np.random.default_rng(2)
    calibration = Calibration(1)
    said = np.full((400, 1), 0.15)
    observe(calibration, said, rng.random((400, 1)) < 0.4)
    assert calibration.conditionals(said[:1], np.zeros(1, bool))[0, 0] == pytest.approx(0.15)
    calibration.fit()
    assert calibration.conditionals(said[:1], np.zeros(1, bool))[0, 0] == pytest.approx(
        0.4, abs=0.07
    )


@given(
    said=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=40),
    held=st.one_of(st.just(0), st.just(2**40 - 1), st.integers(0, 2**40 - 1)),
)
def test_any_data_gives_the_minimum_of_a_convex_loss_and_a_rising_curve(said, held):
    logits = logit(np.array(said))
    held = np.array([bool(held >> i & 1) for i in range(len(said))])
    intercept, slope = fit_logistic(logits, held)
    assert np.isfinite([intercept, slope]).all()
    assert slope >= LEAST_SLOPE
    errors = sigmoid(intercept + slope * logits) - held
    assert errors.sum() + PRIOR[0] * intercept == pytest.approx(0, abs=1e-2)
    down = errors @ logits + PRIOR[1] * (slope - 1)
    assert down == pytest.approx(0, abs=1e-2) or (slope == LEAST_SLOPE and down > 0)


def test_few_observations_change_little():
    intercept, slope = fit_logistic(np.array([0.0]), np.array([True]))
    assert 0 < intercept < 1.1
    assert slope == pytest.approx(1)


def test_kinds_and_levels_are_apart_and_only_drafts_whose_parents_held_count():
    rng = np.random.default_rng(3)
    calibration = Calibration(2)
    said = np.full((600, 2), 0.5)
    is_sampled = np.arange(600) % 2 == 1
    # greedy: both levels hold; sampled: the first never does, so nothing is known of the second
    holds = np.stack([~is_sampled, rng.random(600) < 0.9], axis=1)
    observe(calibration, said, holds, is_sampled)
    calibration.fit()
    greedy, sampled = calibration.conditionals(said[:2], is_sampled[:2])
    assert greedy == pytest.approx([0.99, 0.9], abs=0.04)
    assert sampled == pytest.approx([0.01, 0.5], abs=0.04)


def test_drafts_without_a_row_say_nothing():
    calibration = Calibration(2)
    zeros = np.zeros(50, int)
    calibration.add(np.full((50, 2), 0.5), zeros, zeros, np.zeros(50, bool), 100)
    fits = calibration.num_fits
    calibration.fit()
    assert calibration.num_fits == fits
    calibration.add(np.full((50, 2), 0.5), zeros + 1, zeros, np.zeros(50, bool), 100)
    calibration.fit()
    assert calibration.num_fits == fits + 1
    assert calibration.coefficients[0, 0, 0] < -2
    assert calibration.coefficients[0, 1].tolist() == [0, 1]


def test_only_the_last_drafts_of_a_window_count():
    calibration = Calibration(1)
    said = np.full((300, 1), 0.5)
    observe(calibration, said, np.zeros((300, 1), bool), window=300)
    observe(calibration, said, np.ones((300, 1), bool), window=300)
    calibration.fit()
    assert calibration.conditionals(said[:1], np.zeros(1, bool))[0, 0] > 0.97


def test_a_fit_gives_a_new_array_of_float32():
    calibration = Calibration(1)
    before = calibration.coefficients
    observe(calibration, np.full((9, 1), 0.5), np.ones((9, 1), bool))
    calibration.fit()
    assert before.tolist() == [[[0, 1]], [[0, 1]]]
    assert (calibration.coefficients.shape, calibration.coefficients.dtype) == ((2, 1, 2), "f4")
    assert calibration.coefficients[0, 0, 0] > 1
