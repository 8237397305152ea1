"""What recent rounds showed of drafts of one shape; chains of every length are one.

An entry is one request of one round. Each level has a rate: what the draft says of the chance that
another draft holds if all before it do, which is the quotient of the path probabilities of two
levels, corrected by a factor (factors.py). A level that was not drafted has the mean rate of the
level when it last was.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.factors import IDLE, Factors, fading
from specdec.scheduling.gains import Booleans, Floats, Sample
from specdec.scheduling.outcomes import (
    RoundOutcome,
    Shown,
    shown_by_chains,
    shown_by_trees,
)
from specdec.sizes import DraftShape

SURE = 1 - 1e-4  # a larger rate counts as this one
LEAST_ENTRIES = 8  # with fewer nothing is known; as many rounds are taken in at a time


class ShapeHistory:
    """What rounds showed takes effect by `add`, and fades in all rounds that follow, by `age`.

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
        self._odds = np.zeros((0, L))  # the draft's own
        self._best = np.zeros((0, L))
        self._bounds = np.zeros((0, 2), np.intp)  # levels that ran, levels allowed
        self._kinds = np.zeros(0, np.intp)
        self._weights = np.zeros(0)

    def num_known(self, kind: int | None) -> int:
        """Count entries of a kind of requests; None: of both."""
        return len(self._kinds) if kind is None else int(np.count_nonzero(self._kinds == kind))

    def age(self, num_drafted: int, num_plain: int) -> None:
        self.factors.age(num_drafted, num_plain)
        kept = fading(num_drafted + IDLE * num_plain)
        self._weights = np.maximum(kept * self._weights, np.finfo(float).tiny)

    def add(self, shown: Shown, factors: Floats | None = None) -> None:
        """factors: [2, L] that are in what the draft says, as in that of chains; None: none are"""
        kinds = shown.is_sampled.astype(np.intp)
        rates = np.minimum(_rates(shown.held), SURE)
        odds = rates / (1 - rates)
        if factors is not None:
            odds = odds / factors[kinds]
        self._odds = self._latest(self._odds, odds)
        self._best = self._latest(self._best, shown.best)
        bounds = np.stack([shown.num_run, shown.num_allowed], axis=1)
        self._bounds = self._latest(self._bounds, bounds)
        self._kinds = self._latest(self._kinds, kinds)
        self._weights = self._latest(self._weights, np.ones(len(kinds)))
        self.factors.add(odds, kinds, shown.num_shown, shown.num_accepted)

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


class Histories:
    """Keeps what rounds of chains showed, those of trees by shape, and the chains in these.

    num_levels: the most of a chain
    capacity: entries that each keeps
    """

    def __init__(self, num_levels: int, capacity: int) -> None:
        self._num_levels = num_levels
        self._capacity = capacity
        self.chains = ShapeHistory(num_levels, capacity, is_calibrated=True)
        self._trees: dict[DraftShape, ShapeHistory] = {}
        self._in_trees: dict[DraftShape, ShapeHistory] = {}

    def of(self, shape: DraftShape) -> ShapeHistory:
        if not shape.is_wide:
            return self.chains
        if shape not in self._trees:
            self._trees[shape] = ShapeHistory(shape.levels, self._capacity, is_calibrated=False)
            self._in_trees[shape] = ShapeHistory(self._num_levels, self._capacity, True)
        return self._trees[shape]

    def of_chains_in(self, tree: DraftShape) -> ShapeHistory:
        """Return what chains would have brought where trees of this shape ran."""
        self.of(tree)
        return self._in_trees[tree]

    def know(self, shape: DraftShape, kind: int | None) -> bool:
        return self.of(shape).num_known(kind) >= LEAST_ENTRIES

    def age(self, num_drafted: int, num_plain: int) -> None:
        for history in (self.chains, *self._trees.values(), *self._in_trees.values()):
            history.age(num_drafted, num_plain)

    def add(self, rounds: Sequence[RoundOutcome]) -> None:
        """Take rounds in, those of one tree after another together: it is the dear part."""
        factors = self.chains.factors.values  # that all these drafts had; each group moves them
        for tree, group in itertools.groupby(rounds, key=_tree_of):
            if tree is None:
                self.chains.add(shown_by_chains([*group]), factors)
                continue
            trees, chains = shown_by_trees([*group], self._num_levels)
            self.of(tree).add(trees)
            self.chains.add(chains)
            self.of_chains_in(tree).add(chains)


def _tree_of(outcome: RoundOutcome) -> DraftShape | None:
    return outcome.shape if outcome.shape.is_wide else None


def _rates(held: Floats) -> Floats:
    """Divide each level by the one before it; nothing follows a level of 0."""
    before = np.column_stack([np.ones(len(held)), held[:, :-1]])
    rates = np.zeros_like(held, float)
    return np.asarray(np.divide(held, before, out=rates, where=before > 0))
