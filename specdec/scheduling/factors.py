"""Factors that make as many drafts hold as are expected, whatever the draft says of itself.

An EAGLE-1 head says 0.15 where 0.4 is true. Each level has a factor for greedy requests and one for
sampled ones. It multiplies the odds of what the draft says of the chance that another draft holds
if all before it do, and is counted from all drafts of which was seen whether they hold.
"""

import numpy as np

from specdec.scheduling.costs import MEMORY, Floats
from specdec.scheduling.gains import Booleans, Integers

PRIOR = 2  # made-up drafts of probability 1/2 that count with those shown; half of them held
IDLE = 4  # times as fast what is known fades in plain rounds
CHANGED = 2.5  # standard deviations: what held lately is of another draft than was known


class Factors:
    """most: drafts that are remembered, of each factor. values: [2, L] float32, see above

    is_sole: no drafts of another shape tell whether any pay. Then the prior fades in plain rounds
        as well, or it would draft again what was seen not to pay
    """

    def __init__(self, num_levels: int, most: int, is_sole: bool) -> None:
        self.values = np.ones((2, num_levels), np.float32)
        self._most = most
        self._is_sole = is_sole
        self._sums = np.zeros((3, 2, num_levels))  # drafts shown, those that held, those expected
        # the same of the latest rounds, and those that were expected before they moved the factors
        self._latest = np.zeros((4, 2, num_levels))
        self._prior = float(PRIOR)

    def age(self, num_drafted: int, num_plain: int) -> None:
        """Let what is known fade in rounds with drafts, and faster in plain ones."""
        kept = fading(num_drafted)
        for counts in (self._sums, self._latest):
            counts *= kept * fading(IDLE * num_plain)
        if self._is_sole:
            self._prior *= fading(IDLE * num_plain)
        self._prior = PRIOR - kept * (PRIOR - self._prior)

    def rates(self, odds: Floats, kinds: Integers) -> Floats:
        """[S, L] as many of [S, L] are expected to hold. kinds: [S]"""
        scaled = odds * self.values[kinds]
        return np.asarray(scaled / (1 + scaled))

    def add(self, odds: Floats, kinds: Integers, shown: Integers, accepted: Integers) -> None:
        """Move each factor by the odds of what held to those of what was expected.

        odds: [S, L] of what the draft says. shown, accepted: [S] levels of which was seen whether
        they hold, and those that did
        """
        level = np.arange(odds.shape[1])
        is_shown = (level < shown[:, None]) & (level <= accepted[:, None])
        is_held = is_shown & (level < accepted[:, None])
        of_kinds = (kinds == np.arange(2)[:, None]).astype(float)  # [2, S]
        is_expected = is_shown * self.rates(odds, kinds)
        counts = is_shown, is_held, is_expected, is_expected
        new = np.array([of_kinds @ each for each in counts])
        kept = np.minimum(1, self._most / np.maximum(self._sums[0], 1))
        latest = new + self._latest / 2  # rounds of few requests alone show too little
        self._latest = latest = np.where(_is_changed(new), new, latest)
        is_changed = _is_changed(latest)
        self._sums = np.where(is_changed, latest[:3], new[:3] + kept * self._sums)
        num_shown, held, expected = self._sums
        before = self.values.astype(float)  # in float32 no more is left of 1 / (1 + 2**24)
        prior = self._prior * before / (1 + before)
        moved = _odds(held + self._prior / 2, num_shown + self._prior)
        moved /= _odds(expected + prior, num_shown + self._prior)
        values = np.clip(self.values * moved, 1 / MEMORY**4, MEMORY**4).astype(np.float32)
        for sums in (self._sums, latest):  # or the factor would move once more
            odds_of_all = _odds(sums[2], sums[0]) * (values / self.values)
            sums[2] = sums[0] * odds_of_all / (1 + odds_of_all)
        latest[3] = np.where(is_changed, latest[2], latest[3])  # one change is found once
        self.values = values


def fading(num_rounds: int) -> float:
    """Return the weight of what was known so many rounds ago."""
    return float((1 - 1 / MEMORY) ** num_rounds)


def _is_changed(latest: Floats) -> Booleans:
    num_shown, held, _, expected = latest
    variance = expected * (1 - expected / np.maximum(num_shown, 1)) + 1 / 2
    return np.asarray(np.abs(held - expected) > CHANGED * np.sqrt(variance))


def _odds(count: Floats, total: Floats) -> Floats:
    return np.asarray(count / np.maximum(total - count, np.finfo(float).tiny))
