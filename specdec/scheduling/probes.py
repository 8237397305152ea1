"""Noticing that a draft has changed: rounds of what does not pay; a test of predictions."""

from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROBE_EVERY = 64  # rounds; twice as many, once several probes in a row found that nothing pays
PATIENT_AFTER = 4  # such probes
LEAST_PROBED = 3  # drafts of a level that a probe adds: few requests probe in several rounds
MEMORY = 0.8  # of the running sums, from one comparison to the next
CHANGED = 4.5  # standard deviations of the running sums, beyond
TOLERANCE = 0.2  # of what was predicted: texts differ, so that rounds are no independent draws
PROBE_HELD = 2.5  # standard deviations of a probe that found more than was predicted
KIND_ROUNDS = 3  # that a probe of another kind of drafts has
KIND_COST = 0.005  # share of all time that such probes may take
FIRST_WAIT = 8  # rounds before the first of these, and twice as many before each further one
NOT_FAR = 0.1  # a loss with which the first ones come so early


class Probes:
    """Every PROBE_EVERY rounds or more one level more than pays, from plain rounds two.

    is_live: whether the drafts of the round to plan are a probe
    """

    def __init__(self, num_levels: int) -> None:
        self._num_levels = num_levels
        self._num_since = 0
        self._num_idle = 0  # probes since a draft paid
        self.is_live = False
        self.num_probes = 0

    def again(self) -> None:
        self._num_since = PROBE_EVERY
        self._num_idle = 0

    def levels(self, steady: int, num_drafting: int) -> int:
        """How many the draft runs after the round to plan; steady: where no probe is due."""
        self._num_since += 1
        if steady > 0:
            self._num_idle = 0
        num_rounds = ceil(LEAST_PROBED / num_drafting)
        wait = PROBE_EVERY if self._num_idle < PATIENT_AFTER else 2 * PROBE_EVERY
        self.is_live = self._num_since >= wait and steady < self._num_levels
        if self._num_since >= wait + num_rounds - 1:
            self._num_since = 0
            self._num_idle += 1
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
        of_all = sizes[: int(np.searchsorted(sizes, num_requests + num_drafts)) + 1]
        few = of_all[of_all <= chosen + num_requests // 8 + 8]
        has_draft = few[-1] > num_requests or len(of_all) == 1
        return max(chosen, int(few[-1] if has_draft else of_all[1]))


class KindProbes:
    """Every PROBE_EVERY rounds, or more where they cost more, some of the kind not chosen.

    The first few come earlier: until then the choice rests on little.
    """

    def __init__(self) -> None:
        self.num_probes = 0
        self.reset()

    def reset(self) -> None:
        self._num_since = 0

    def is_due(self, loss: float) -> bool:
        """Whether the next drafts are a probe. loss: share of a round's time that one costs."""
        self._num_since += 1
        wait = max(PROBE_EVERY, KIND_ROUNDS * loss / KIND_COST)
        if loss < NOT_FAR:
            wait = min(wait, FIRST_WAIT * 2 ** min(self.num_probes, 8))
        if self._num_since >= wait + KIND_ROUNDS:
            self._num_since = 0
            self.num_probes += 1
        return self._num_since >= wait


class Surprise:
    """Compares accepted drafts with predicted ones, and forgets old comparisons slowly.

    If chains hold as predicted, an accepted count is roughly geometric: variance m (1 + m) for a
    mean of m. The prediction itself is the mean of a sample.
    """

    def __init__(self) -> None:
        self._new = np.zeros(3)  # difference, variance and prediction since the last question
        self._sums = np.zeros(3)

    def add(self, predicted: float, accepted: int, num_drafting: int, num_entries: int) -> None:
        """One round; num_entries: of the sample that predicted it."""
        mean = predicted / num_drafting
        variance = predicted * (1 + mean) * (1 + num_drafting / num_entries)
        self._new += (accepted - predicted, variance, predicted)

    def has_changed(self, is_probe: bool) -> bool:
        """Whether the draft is not the one that was sampled. is_probe: only a better one counts."""
        self._sums = self._sums * (MEMORY, MEMORY**2, MEMORY) + self._new
        if is_probe:
            difference, variance, _ = self._new
            changed = difference > PROBE_HELD * sqrt(variance)
        else:
            difference, variance, predicted = self._sums
            changed = abs(difference) > CHANGED * sqrt(variance) + TOLERANCE * predicted
        self._new = np.zeros(3)
        if changed:
            self._sums = np.zeros(3)
        return bool(changed)
