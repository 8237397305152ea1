"""Expected accepted drafts of a round, by levels drafted and rows given to drafts.

A node's path probability is the chance that it and all before it hold. A round that gives rows to
some nodes accepts, on average, the sum of their path probabilities. It is averaged over batches of
recent rounds, so requests that are easy to predict and others are both in it.

Drafts may stop where the mean path probability of those that may have another level falls below a
threshold (rounds/level.py). Later levels then take next to no time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests of recent rounds, in groups of as many as share a round; G groups of n.

    held: [G, n, L] accepted drafts to expect of each level. They fall along a row, so of chains the
        most probable drafts are a prefix of each request's; 0 beyond a request's bound
    votes: [G, L] mean path probability after each level of the requests that may have another
    weights: [G] that sum to 1
    """

    held: Floats
    votes: Floats
    weights: Floats

    @classmethod
    def of(cls, held_SL: Floats, best_SL: Floats, weights_S: Floats, num_requests: int) -> "Sample":
        """Group entries, the oldest first; what remains of the oldest is left out.

        best_SL: the most probable path of each level, which votes
        """
        num_entries, L = held_SL.shape
        n = min(num_requests, num_entries)
        first = num_entries % n
        held, best = (each[first:].reshape(-1, n, L) for each in (held_SL, best_SL))
        has_room = best[..., 1:] > 0
        votes = (best[..., :-1] * has_room).sum(axis=1) / np.maximum(has_room.sum(axis=1), 1)
        weights = weights_S[first:].reshape(-1, n)[:, -1]
        return cls(held, votes, weights / weights.sum())


class GainCurve:
    """What drafts of a sample bring if they stop below a threshold.

    levels_run: [L] of 1 to L levels, how many run on average
    means: [L] accepted drafts of a request of which all are verified, by levels
    """

    def __init__(self, sample: Sample, threshold: float) -> None:
        self.threshold = threshold
        self._sample = sample
        self._is_run = np.ones((len(sample.held), sample.held.shape[-1]), bool)
        if threshold > 0:
            goes_on = sample.votes >= threshold
            np.logical_and.accumulate(goes_on, axis=1, out=self._is_run[:, 1:])
        run = sample.weights @ self._is_run
        self.levels_run = run.cumsum()
        of_levels = sample.weights @ (sample.held.mean(axis=1) * self._is_run)
        self.means = of_levels.cumsum()
        self._sums_of: dict[int, Floats] = {}  # by levels

    def gains(self, num_levels: int, num_rows: Any, num_requests: int) -> Floats:
        """Expect accepted drafts if num_rows [C] drafts of num_requests requests are verified."""
        scale = self._sample.held.shape[1] / num_requests
        sums = self._sums(num_levels)
        return np.asarray(np.interp(num_rows * scale, np.arange(len(sums)), sums) / scale)

    def _sums(self, num_levels: int) -> Floats:
        """Sum the most probable drafts of a group, [1 + n * num_levels]."""
        if num_levels not in self._sums_of:
            drafted = (self._sample.held * self._is_run[:, None])[..., :num_levels]
            live = drafted.reshape(len(drafted), -1)
            largest_first = self._sample.weights @ np.sort(live, axis=1)[:, ::-1]
            self._sums_of[num_levels] = np.concatenate([[0.0], largest_first.cumsum()])
        return self._sums_of[num_levels]
