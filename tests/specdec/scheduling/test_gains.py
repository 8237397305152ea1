"""Expected accepted drafts against rounds in which rows are shared out one by one."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from specdec.scheduling.gains import GainCurve, Sample


def curve(held, num_requests, threshold=0.0, best=None, weights=None):
    weights = np.ones(len(held)) if weights is None else weights
    sample = Sample.of(held, held if best is None else best, weights, num_requests)
    return GainCurve(sample, threshold)


def chains(rng, num_samples, num_levels):
    """Path probabilities of requests that differ: some are easy, some are not."""
    easy = rng.beta(2, 2, size=(num_samples, 1))
    return np.cumprod(easy ** rng.exponential(size=(num_samples, num_levels)), axis=1)


def shared(rng, paths, num_levels, num_rows):
    """Drafts that hold in one round: the most probable ones verify, each request a prefix."""
    num_requests = len(paths)
    num_verified = np.zeros(num_requests, int)
    for _ in range(num_rows):
        nexts = [p[n] if n < num_levels else -1.0 for p, n in zip(paths, num_verified, strict=True)]
        if max(nexts) < 0:
            break
        num_verified[int(np.argmax(nexts))] += 1
    conditionals = paths / np.concatenate([np.ones((num_requests, 1)), paths[:, :-1]], axis=1)
    holds = np.cumprod(rng.random(paths.shape) < conditionals, axis=1)
    return sum(int(holds[i, :n].sum()) for i, n in enumerate(num_verified))


@pytest.mark.parametrize("num_requests", [1, 3, 16])
@pytest.mark.parametrize("num_levels, per_request", [(1, 0.5), (3, 1.0), (3, 2.0), (5, 5.0)])
def test_gains_are_those_of_rounds_that_share_rows(num_requests, num_levels, per_request):
    rng = np.random.default_rng(num_requests)
    sample = chains(rng, 480, 5)
    found = curve(sample, num_requests)
    num_rows = int(per_request * num_requests)
    drawn = []
    for _ in range(600):
        batch = sample[rng.integers(0, len(sample), num_requests)]
        drawn.append(shared(rng, batch, num_levels, num_rows))
    error = np.std(drawn) / np.sqrt(len(drawn))
    gain = found.gains(num_levels, num_rows, num_requests)
    # the sample's own groups are one draw of batches; 4 standard errors of the rounds
    assert gain == pytest.approx(np.mean(drawn), abs=4 * error + 0.04 * num_requests**0.5)


def test_another_number_of_requests_scales_the_curve():
    found = curve(chains(np.random.default_rng(0), 256, 4), 64)
    for rows in (1, 30, 64, 200):
        assert found.gains(4, rows, 64) / 64 == pytest.approx(found.gains(4, rows / 2, 32) / 32)


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), num_requests=st.integers(1, 40), num_samples=st.integers(1, 90))
def test_all_rows_give_the_sum_and_more_rows_bring_less_each(seed, num_requests, num_samples):
    sample = chains(np.random.default_rng(seed), num_samples, 3)
    found = curve(sample, num_requests)
    size = min(num_requests, num_samples)
    used = sample[num_samples % size :]
    rows = np.arange(3 * num_requests + 3)
    for level in (1, 2, 3):
        gains = found.gains(level, rows, num_requests)
        total = used[:, :level].sum() / len(used) * num_requests
        assert gains[0] == 0
        assert gains[level * num_requests :] == pytest.approx(total)
        assert found.means[level - 1] * num_requests == pytest.approx(total)
        assert (np.diff(gains) >= -1e-9).all()
        assert (np.diff(gains, 2) <= 1e-9).all()


def test_a_group_shares_among_its_own_requests_only():
    # each alone: the first request's second draft cannot take the row of the second request
    sample = np.array([[0.9, 0.8], [0.2, 0.1]])
    assert curve(sample, 1).gains(2, 1, 1) == pytest.approx((0.9 + 0.2) / 2)
    assert curve(sample, 2).gains(2, 2, 2) == pytest.approx(0.9 + 0.8)


def test_what_is_older_counts_less():
    sample = np.array([[0.9, 0.8], [0.2, 0.1]])
    found = curve(sample, 1, weights=np.array([1.0, 3.0]))
    assert found.means.tolist() == pytest.approx([0.375, 0.375 + 0.275])
    assert found.gains(2, 1, 1) == pytest.approx(0.375)


def test_a_draft_that_stopped_has_no_later_levels_and_a_level_that_none_has_is_not_run():
    sample = np.array([[0.9, 0.5, 0.2], [0.1, 0.08, 0.01], [0.8, 0.15, 0.1], [0.6, 0.4, 0.3]])
    alone = curve(sample, 1, 0.2)
    assert alone.levels_run.tolist() == [1, 1 + 3 / 4, 1 + 3 / 4 + 2 / 4]
    assert alone.gains(3, 3, 1) == pytest.approx((0.9 + 0.5 + 0.2 + 0.1 + 0.8 + 0.15 + 1.3) / 4)
    both = curve(sample, 2, 0.28)
    # means of 0.5 and 0.29, 0.7 and 0.275
    assert both.levels_run.tolist() == [1, 2, 2 + 1 / 2]
    held = 0.9 + 0.5 + 0.2 + 0.1 + 0.08 + 0.01 + 0.8 + 0.15 + 0.6 + 0.4
    assert both.gains(3, 6, 2) == pytest.approx(held / 2)
    assert curve(sample, 1).levels_run.tolist() == [1, 2, 3]


def stopped_levels(paths, bounds, threshold):
    """Levels that a group drafts: one after another, as long as the mean path holds."""
    level = 0
    while level + 1 < paths.shape[1]:
        voters = [b for b, bound in enumerate(bounds) if bound > level + 1]
        if not voters or np.mean([paths[b, level] for b in voters]) < threshold:
            break
        level += 1
    return level + 1


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), num_requests=st.integers(1, 12), threshold=st.floats(0.01, 0.9))
def test_a_group_stops_together_by_its_own_paths(seed, num_requests, threshold):
    """The paths that stop it may be others than those that hold; some requests are bounded."""
    rng = np.random.default_rng(seed)
    K, num_groups = 5, 4
    size = num_groups * num_requests
    bounds = rng.integers(1, K + 1, size)
    is_allowed = np.arange(K) < bounds[:, None]
    paths, own = (np.where(is_allowed, chains(rng, size, K), 0.0) for _ in range(2))
    unused = chains(rng, num_requests - 1, K)  # older than a whole group
    sample, stopping = (np.concatenate([unused, each]) for each in (paths, own))
    found = curve(sample, num_requests, threshold, stopping)
    groups = np.arange(size).reshape(num_groups, num_requests)
    levels = [stopped_levels(own[group], bounds[group], threshold) for group in groups]
    run = [np.mean([min(n, most) for n in levels]) for most in range(1, K + 1)]
    assert found.levels_run == pytest.approx(run)
    held = sum(paths[group, :n].sum() for group, n in zip(groups, levels, strict=True))
    assert found.gains(K, K * num_requests, num_requests) == pytest.approx(held / num_groups)
    best = [
        np.sort(paths[g, :n].ravel())[::-1][:3].sum() for g, n in zip(groups, levels, strict=True)
    ]
    assert found.gains(K, 3, num_requests) == pytest.approx(np.mean(best))
