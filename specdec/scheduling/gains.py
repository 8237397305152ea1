"""Expected accepted drafts of a round, by levels drafted and rows given to drafts.

A draft's path probability is the chance that it and all before it hold. A round that gives n rows
to the n most probable live drafts of the batch accepts, on average, the sum of their path
probabilities. It is averaged over batches of recent rounds (an empirical sample), so no shape of
the distribution is assumed; requests that are easy to predict and others are both in it.

A draft may stop where its path probability falls below a threshold (stepping/stop_drafting.py). It
then has no later levels, and a level that no request of the batch has takes next to no time.
"""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


class GainCurves:
    """The mean, over groups of a sample, of the n largest path probabilities among L levels.

    path_probs: [S, K] float: requests of recent rounds, oldest first. They fall along a row, so the
        most probable drafts are a prefix of each request's chain.
    num_requests: requests that share rows. The sample is split into groups of this many, in its
        order; what remains of the oldest is left out, and a smaller sample is one group.
    threshold: below which a draft stops; 0: never
    own_paths: [S, K] the path probabilities that stop it; None: path_probs
    levels_run: [K] of 1 to K levels, how many are drafted on average for any request of a group
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
        self.threshold = threshold
        self.group_size = min(num_requests, num_samples)
        num_groups = num_samples // self.group_size
        first = num_samples - num_groups * self.group_size
        shape = num_groups, self.group_size, num_levels
        groups = path_probs[first:].reshape(shape).copy()
        stopping = path_probs if own_paths is None else own_paths
        goes_on = stopping[first:].reshape(shape)[..., :-1] >= threshold
        groups[..., 1:] *= goes_on
        self._groups = groups
        self.levels_run = np.cumsum([1.0, *goes_on.any(axis=1).mean(axis=0)])
        self.means = groups.mean(axis=(0, 1)).cumsum()

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
        for level, start in enumerate(self._starts, start=1):
            live = self._groups[:, :, :level].reshape(len(self._groups), -1)
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
        """[K, C]: the same for every number of levels, and num_rows [C] rows of drafts."""
        scale = self.group_size / num_requests
        places = np.minimum(np.maximum(num_rows, 0) * scale, self._sizes[:, None])
        low = places.astype(np.intp)
        share = places - low
        low += self._starts[:, None]
        below = self._sums[low]
        return np.asarray((below + share * (self._sums[low + 1] - below)) / scale)
