"""Noticing that a draft has changed: rounds with more levels than pay; a test of predictions."""

from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROBE_EVERY = 64  # rounds
LEAST_PROBED = 3  # requests and rounds of a probe from plain rounds
MEMORY = 0.8  # of the running sums, from one comparison to the next
CHANGED = 3.5  # standard deviations of the running sums
PROBE_HELD = 2.5  # and of a probe that found more than was predicted


class Probes:
    """Every PROBE_EVERY rounds one level more than pays, from plain rounds two.

    is_live: whether the drafts of the round to plan are a probe
    """

    def __init__(self, num_levels: int) -> None:
        self._num_levels = num_levels
        self._num_since = 0
        self.is_live = False
        self.num_probes = 0

    def again(self) -> None:
        """Probe in the next round."""
        self._num_since = PROBE_EVERY

    def levels(self, steady: int, num_drafting: int) -> int:
        """How many to draft where `steady` would pay; few requests probe in several rounds."""
        self._num_since += 1
        num_rounds = ceil(LEAST_PROBED / num_drafting) if steady == 0 else 1
        self.is_live = self._num_since >= PROBE_EVERY and steady < self._num_levels
        if self._num_since >= PROBE_EVERY + num_rounds - 1:
            self._num_since = 0
        if not self.is_live:
            return steady
        self.num_probes += 1
        return min(max(steady + 1, 2), self._num_levels)

    def rows(
        self, sizes: NDArray[np.integer[Any]], chosen: int, num_requests: int, num_drafts: int
    ) -> int:
        """Rows of a round whose drafts are a probe: a few more than chosen, at least one draft's.

        The device gives them to the most probable drafts, which is where a gain would come from.
        """
        most = min(chosen + num_requests // 8 + 8, num_requests + num_drafts)
        fits = sizes[: max(1, int(np.searchsorted(sizes, most, side="right")))]
        if fits[-1] == num_requests and len(sizes) > 1:
            return int(sizes[1])
        return max(chosen, int(fits[-1]))


class Surprise:
    """Compares accepted drafts with predicted ones, and forgets old comparisons slowly.

    If chains hold as predicted, an accepted count is roughly geometric: variance m (1 + m) for a
    mean of m. The prediction itself is the mean of a sample.
    """

    def __init__(self) -> None:
        self._round = np.zeros(2)  # difference and variance since the last question
        self._sums = np.zeros(2)

    def add(self, predicted: float, accepted: int, num_drafting: int, num_entries: int) -> None:
        """One round; num_entries: of the sample that predicted it."""
        mean = predicted / num_drafting
        variance = predicted * (1 + mean) * (1 + num_drafting / num_entries)
        self._round += (accepted - predicted, variance)

    def has_changed(self, is_probe: bool) -> bool:
        """Whether the draft is not the one that was sampled. is_probe: only a better one counts."""
        difference, variance = self._round
        self._sums = self._sums * (MEMORY, MEMORY**2) + self._round
        self._round = np.zeros(2)
        if is_probe:
            changed = difference > PROBE_HELD * sqrt(variance)
        else:
            changed = abs(self._sums[0]) > CHANGED * sqrt(self._sums[1])
        if changed:
            self._sums = np.zeros(2)
        return bool(changed)
