"""What recent rounds showed of drafts of one shape; chains of every length are one.

An entry is one request of one round. Each level has a rate: what the draft says of the chance that
another draft holds if all before it do, which is the quotient of the path probabilities of two
levels, corrected by a factor (factors.py). A level that was not drafted has the mean rate of the
level when it last was.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.factors import IDLE, Factors, fading
from specdec.scheduling.gains import Booleans, Floats, Integers, Sample
from specdec.sizes import DraftShape

SURE = 1 - 1e-4  # a larger rate counts as this one
LEAST_ENTRIES = 8  # with fewer nothing is known; as many rounds are merged at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What one verified round showed, by batch slot; L is the most levels of the shape.

    shape: of the drafts; of a chain, its levels are those that were launched
    held: [B, L] summed path probabilities of each level's live nodes
    best: [B, L] the most probable path of each level
    num_run: levels that were drafted before all stopped
    num_shown: [B] levels of which was seen whether another draft holds
    num_verified: [B] drafts that had a row
    num_accepted: [B] drafts that held
    num_allowed: [B] the most levels that the request may have; 0 where it must not draft
    is_sampled: [B] temperature > 0
    chains: of trees: what chains would have shown in their stead, by the draft's own probabilities
    """

    shape: DraftShape
    held: Floats
    best: Floats
    num_run: int
    num_shown: Integers
    num_verified: Integers
    num_accepted: Integers
    num_allowed: Integers
    is_sampled: Booleans
    chains: "RoundOutcome | None" = None


class ShapeHistory:
    """Rounds are kept by `add` and take effect together by `merge`, which is the dear part.

    What they showed fades in all rounds that follow, by `age`.

    num_levels: L
    capacity: entries that are kept
    is_calibrated: the draft's probabilities have these factors already, as those of chains have;
        then all paths vote as they are expected to hold, else by the draft's own probabilities
    """

    def __init__(self, num_levels: int, capacity: int, is_calibrated: bool) -> None:
        L = num_levels
        self._capacity = capacity
        self._is_calibrated = is_calibrated
        self.factors = Factors(L, 2 * capacity, is_sole=is_calibrated)
        self._mean_rates = np.full(L, np.nan)
        self._pending: list[RoundOutcome] = []
        self._odds = np.zeros((0, L))  # the draft's own
        self._best = np.zeros((0, L))
        self._bounds = np.zeros((0, 2), np.intp)  # levels that ran, levels allowed
        self._kinds = np.zeros(0, np.intp)
        self._weights = np.zeros(0)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def num_known(self, kind: int | None) -> int:
        """Count entries of a kind of requests; None: of both."""
        return len(self._kinds) if kind is None else int(np.count_nonzero(self._kinds == kind))

    def add(self, outcome: RoundOutcome) -> None:
        """Keep a round of at most L levels."""
        L = self._odds.shape[1]
        if outcome.held.shape[1] < L:
            held = _widened(outcome.held, L)
            best = held if outcome.best is outcome.held else _widened(outcome.best, L)
            outcome = replace(outcome, held=held, best=best)
        self._pending.append(outcome)

    def age(self, num_drafted: int, num_plain: int) -> None:
        self.factors.age(num_drafted, num_plain)
        kept = fading(num_drafted + IDLE * num_plain)
        self._weights = np.maximum(kept * self._weights, np.finfo(float).tiny)

    def merge(self) -> None:
        """Take the pending rounds in."""
        rounds, self._pending = self._pending, []
        allowed = np.concatenate([each.num_allowed for each in rounds])
        drafts = allowed > 0

        def joined(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(each, name) for each in rounds])[drafts]

        kinds = joined("is_sampled").astype(np.intp)
        run = np.concatenate([np.full(len(each.held), each.num_run) for each in rounds])
        bounds = np.stack([run, allowed], axis=1)[drafts]
        rates = np.minimum(_rates(joined("held")), SURE)
        odds = rates / (1 - rates)
        if self._is_calibrated:
            has_factors = np.concatenate([np.full(len(e.held), e.shape.width == 1) for e in rounds])
            odds = np.where(has_factors[drafts, None], odds / self.factors.values[kinds], odds)
        self._odds = self._latest(self._odds, odds)
        self._best = self._latest(self._best, joined("best"))
        self._bounds = self._latest(self._bounds, bounds)
        self._kinds = self._latest(self._kinds, kinds)
        self._weights = self._latest(self._weights, np.ones(len(kinds)))
        self.factors.add(odds, kinds, joined("num_shown"), joined("num_accepted"))

    def sample(self, kind: int | None, num_requests: int) -> Sample:
        """Return the paths of the latest entries of a kind, in groups of num_requests."""
        of_kind = slice(None) if kind is None else self._kinds == kind
        odds, best, weights = self._odds[of_kind], self._best[of_kind], self._weights[of_kind]
        run, allowed = self._bounds[of_kind].T
        level = np.arange(odds.shape[1])
        is_known = level < np.minimum(run, allowed)[:, None]
        rates = self.factors.rates(odds, self._kinds[of_kind])
        rates = np.where(is_known, rates, self._means(rates, is_known, weights))
        rates[level >= allowed[:, None]] = 0.0
        held = rates.cumprod(axis=1)
        if self._is_calibrated:
            return Sample.of(held, held, weights, num_requests)
        at = np.minimum(level, np.maximum(run - 1, 0)[:, None])
        beyond = np.where(is_known, 1.0, rates).cumprod(axis=1)
        best = np.take_along_axis(best, at, axis=1) * beyond
        return Sample.of(held, best, weights, num_requests)

    def _means(self, rates: Floats, is_known: Booleans, weights: Floats) -> Floats:
        """[L] mean rates where all before hold; never drafted: as the level before."""
        before = np.ones_like(rates)
        before[:, 1:] = np.where(is_known, rates, 0.0).cumprod(axis=1)[:, :-1]
        before *= np.where(is_known, weights[:, None], 0.0)
        total, held = before.sum(axis=0), (before * rates).sum(axis=0)
        found, rate = np.empty_like(total), 1 / 2
        for level, known in enumerate(self._mean_rates):
            rate = rate if np.isnan(known) else known
            if total[level] > 0:
                rate = (held[level] + 2 * rate) / (total[level] + 2)
                self._mean_rates[level] = rate
            found[level] = rate
        return np.asarray(found)

    def _latest(self, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.concatenate([old, new])[-self._capacity :])


def _widened(levels: Floats, num_levels: int) -> Floats:
    widened = np.zeros((len(levels), num_levels))
    widened[:, : levels.shape[1]] = levels
    return widened


def _rates(held: Floats) -> Floats:
    """Divide each level by the one before it; nothing follows a level of 0."""
    before = np.column_stack([np.ones(len(held)), held[:, :-1]])
    rates = np.zeros_like(held, float)
    return np.asarray(np.divide(held, before, out=rates, where=before > 0))
