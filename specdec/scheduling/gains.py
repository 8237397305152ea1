"""Expected accepted drafts of a round, by levels drafted and rows given to drafts.

A draft's path probability is the chance that it and all before it hold. A round that gives n rows
to the n most probable live drafts of the batch accepts, on average, the sum of their path
probabilities. It is averaged over batches of recent rounds (an empirical sample), so no shape of
the distribution is assumed; requests that are easy to predict and others are both in it.

Drafts may stop where the mean path probability of those that may have another level falls below a
threshold (rounds/level.py). Later levels then take next to no time.
"""

from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


class GainCurves:
    """The mean, over groups of a sample, of the n largest path probabilities among L levels.

    path_probs: [S, K] float: requests of recent rounds, oldest first. They fall along a row, so the
        most probable drafts are a prefix of each request's chain; 0 beyond a request's bound.
    num_requests: requests that share rows. The sample is split into groups of this many, in its
        order; what remains of the oldest is left out, and a smaller sample is one group.
    threshold: of a group's mean path probability, below which its drafts stop; 0: never
    own_paths: [S, K] the path probabilities that stop them; None: path_probs
    levels_run: [K] of 1 to K levels, how many a group drafts on average
    means: [K] accepted drafts of a request of which all are verified, by levels

    A planner compares several thresholds by these, and looks up rows for one: they are sorted late.
    """

    def __init__(
        self,
        path_probs: Floats,
        num_requests: int,
        threshold: float = 0.0,
        own_paths: Floats | None = None,
    ) -> None:
        num_samples, num_levels = path_probs.shape
        self.num_requests = num_requests
        self.group_size = min(num_requests, num_samples)
        num_groups = num_samples // self.group_size
        first = num_samples - num_groups * self.group_size
        shape = num_groups, self.group_size, num_levels
        self._groups = path_probs[first:].reshape(shape)
        self._held = self._groups.sum(axis=1)
        stopping = path_probs if own_paths is None else own_paths
        self._votes = _mean_votes(stopping[first:].reshape(shape))
        self._stop_below(threshold)

    def at(self, threshold: float) -> "GainCurves":
        """Stop the drafts of this sample at another threshold."""
        other = copy(self)
        vars(other).pop("_sums", None)
        other._stop_below(threshold)
        return other

    def _stop_below(self, threshold: float) -> None:
        self.threshold = threshold
        is_run = np.ones(self._held.shape, bool)
        if threshold > 0:
            np.logical_and.accumulate(self._votes >= threshold, axis=1, out=is_run[:, 1:])
        self._is_run = is_run
        self.levels_run = is_run.sum(axis=0).cumsum() / len(is_run)
        self.means = (self._held * is_run).sum(axis=0).cumsum() / self._groups[..., 0].size

    @cached_property
    def _sizes(self) -> Integers:
        """[K] drafts of a group, by levels."""
        return np.asarray(self.group_size * np.arange(1, len(self.means) + 1))

    @cached_property
    def _starts(self) -> Integers:
        """[K] of the curves in `_sums`."""
        return np.asarray(np.cumsum([0, *(self._sizes[:-1] + 1)]))

    @cached_property
    def _sums(self) -> Floats:
        """The curves one after another, 1 + group_size * L of L levels."""
        # one more entry, which is read with weight 0 at the end of the last curve
        sums = np.zeros(int((self._sizes + 1).sum()) + 1)
        drafted = self._groups * self._is_run[:, None]
        for level, start in enumerate(self._starts, start=1):
            live = drafted[:, :, :level].reshape(len(drafted), -1)
            largest_first = np.sort(live, axis=1)[:, ::-1].mean(axis=0)
            sums[start + 1 : start + 1 + len(largest_first)] = np.cumsum(largest_first)
        return sums

    def gain(self, num_levels: int, num_rows: float, num_requests: int) -> float:
        """Expected accepted drafts when num_rows drafts of num_requests requests are verified."""
        if num_rows >= num_levels * num_requests:
            return float(num_requests * self.means[num_levels - 1])
        scale = self.group_size / num_requests
        place = min(max(num_rows, 0.0) * scale, float(self._sizes[num_levels - 1]))
        low = int(place)
        start = int(self._starts[num_levels - 1]) + low
        below, above = float(self._sums[start]), float(self._sums[start + 1])
        return float((below + (place - low) * (above - below)) / scale)

    def gains(self, num_rows: Integers, num_requests: int) -> Floats:
        """Return the gain for every number of levels and num_rows [C] rows of drafts, [K, C]."""
        scale = self.group_size / num_requests
        places = np.minimum(np.maximum(num_rows, 0) * scale, self._sizes[:, None])
        low = places.astype(np.intp)
        share = places - low
        low += self._starts[:, None]
        below = self._sums[low]
        return np.asarray((below + share * (self._sums[low + 1] - below)) / scale)


def _mean_votes(paths: Floats) -> Floats:
    """Average, by group and level, the paths of requests that may have the next level; 0: none may.

    Returns [groups, K - 1].
    """
    has_room = paths[..., 1:] > 0
    sums = (paths[..., :-1] * has_room).sum(axis=1)
    return np.asarray(sums / np.maximum(has_room.sum(axis=1), 1))
