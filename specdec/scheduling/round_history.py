"""What recent rounds showed of the draft: a ring of its probabilities, and their calibration.

The ring holds one entry per request and round with drafts: the raw probabilities of the draft, so
that a better calibration applies to old entries too. A level that was not drafted takes the mean
conditional rate that the level had when it was last drafted.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.calibration import Booleans, Calibration, Floats, Integers

IMPROBABLE = 1e-4  # for a draft that was not made because many others were more probable
RATE_WEIGHT = 2.0  # weight of what was known, in drafts whose parents held, in a level's mean rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What one verified round showed; arrays by batch slot.

    confidences: [B, K] float32, the draft's own probability of each live draft given that those
        before it hold; only the first num_live count, up to the first 0, where the draft stopped
    num_live: levels that the drafts of this round had, of the requests that did not stop before
    num_verified: [B] drafts that got a row
    num_accepted: [B] drafts that held
    is_sampled: [B] bool, temperature > 0
    num_allowed: [B] the most drafts the request may have (its own num_speculative_tokens, room in
        the context); 0 where it must not draft
    """

    confidences: Floats
    num_live: int
    num_verified: Integers
    num_accepted: Integers
    is_sampled: Booleans
    num_allowed: Integers


class RoundHistory:
    """Rounds are kept by `add` and take effect together by `merge`, which is the dear part.

    num_levels: K
    capacity: entries that the ring holds
    """

    def __init__(self, num_levels: int, capacity: int) -> None:
        self.calibration = Calibration(num_levels)
        self._num_levels = num_levels
        self._capacity = capacity
        self._pending: list[RoundOutcome] = []
        self.forget()

    def forget(self) -> None:
        """Drop the ring, the rates and the calibration, but not what waits for `merge`."""
        K = self._num_levels
        self._confidences = np.zeros((0, K), np.float32)
        self._bounds = np.zeros((0, 2), np.intp)  # drafted levels, allowed levels
        self._is_sampled = np.zeros(0, bool)
        self._rates = np.full(K, np.nan)
        self.calibration.forget()

    def __len__(self) -> int:
        return len(self._confidences)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, outcome: RoundOutcome) -> None:
        """Keep a round. Its confidences, part of a larger array, are copied; the rest is kept."""
        self._pending.append(replace(outcome, confidences=outcome.confidences.copy()))

    def keep_kind(self, is_sampled: bool) -> bool:
        """Drop what greedy requests left, or sampled ones. Returns whether there was any."""
        kept = self._is_sampled == is_sampled
        if kept.all():
            return False
        self._confidences, self._bounds = self._confidences[kept], self._bounds[kept]
        self._is_sampled = self._is_sampled[kept]
        return True

    def merge(self, window: int) -> None:
        """Put the pending rounds into the ring and the calibration's windows."""
        rounds, self._pending = self._pending, []
        allowed = np.concatenate([each.num_allowed for each in rounds])
        drafts = allowed > 0
        confidences = np.concatenate([each.confidences for each in rounds])[drafts]
        is_sampled = np.concatenate([each.is_sampled for each in rounds])[drafts]
        live = [np.minimum(_num_drafted(each.confidences), each.num_live) for each in rounds]
        bounds = np.stack([np.concatenate(live), allowed], axis=1)[drafts]
        self.calibration.add(
            confidences,
            np.concatenate([each.num_verified for each in rounds])[drafts],
            np.concatenate([each.num_accepted for each in rounds])[drafts],
            is_sampled,
            window,
        )
        self._confidences = self._keep(self._confidences, confidences)
        self._bounds = self._keep(self._bounds, bounds)
        self._is_sampled = self._keep(self._is_sampled, is_sampled)

    def path_probs(self, num_entries: int) -> tuple[Floats, Floats]:
        """[S, K] path probabilities of the last entries, 0 beyond a request's bound.

        Calibrated, and the draft's own, with mean rates for what was not drafted.
        """
        confidences = self._confidences[-num_entries:]
        live, allowed = self._bounds[-num_entries:].T
        levels = np.arange(self._num_levels)
        is_live = levels < np.minimum(live, allowed)[:, None]
        conditionals = self.calibration.conditionals(confidences, self._is_sampled[-num_entries:])
        drafted = np.multiply.accumulate(np.where(is_live, conditionals, 0.0), axis=1)
        filled = np.where(is_live, conditionals, self._update_rates(drafted, is_live))
        filled[levels >= allowed[:, None]] = 0.0
        own = np.where(is_live, confidences, filled)
        return np.asarray(np.cumprod(filled, axis=1)), np.asarray(np.cumprod(own, axis=1))

    def _update_rates(self, drafted_SK: Floats, is_live_SK: Booleans) -> Floats:
        """[K] mean conditionals where the parents hold; never drafted: as the level before."""
        parents = np.column_stack([np.ones(len(drafted_SK)), drafted_SK[:, :-1]])
        weights = np.where(is_live_SK, parents, 0.0).sum(axis=0)
        held = drafted_SK.sum(axis=0)
        rates = np.empty(self._num_levels)
        guess = 0.5
        for level, known in enumerate(self._rates):
            guess = guess if np.isnan(known) else float(known)
            rates[level] = guess
            if weights[level] > 0:
                rates[level] = (held[level] + RATE_WEIGHT * guess) / (weights[level] + RATE_WEIGHT)
                self._rates[level] = rates[level]
            guess = float(rates[level])
        return rates

    def _keep(self, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([old, new])[-self._capacity :]


def _num_drafted(confidences: Floats) -> Integers:
    """[B] drafts before the first without a confidence."""
    return np.asarray((confidences > 0).cumprod(axis=1).sum(axis=1))
