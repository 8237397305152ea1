"""Ways to go on for ever: what to draft and how many rows to verify, with tokens per millisecond.

Prompts come with the tokens that end requests, as many with each. So what their rows take beside
one row of each request is the same for each token, whatever is drafted, and is no part of a rate.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.costs import MEMORY, StepCosts, StepKind, StepTimes
from specdec.scheduling.gains import Floats, GainCurve, Sample
from specdec.sizes import PLAIN, DraftShape, chain

THRESHOLDS = (0.04, 0.08, 0.15)  # of mean path probabilities, for drafts of a few to stop below
# Requests: the drafts of more never stop, since their mean hardly changes, and an eighth more have
# the same curves.
FEW = 8


class Way(NamedTuple):
    """shape: that is drafted in each round; curve: what it brings; plain rounds have none."""

    shape: DraftShape
    rate: float  # tokens per millisecond, with the best number of rows
    curve: GainCurve | None = None


class Load(NamedTuple):
    """What all ways to go on have in common.

    num_drafting: requests that may have drafts. keys_ms: that reading their contexts takes
    share, num_prompt_rows: of the steps, those in which prompts ride, and how many rows
    """

    num_requests: int
    num_drafting: int
    keys_ms: float
    share: float
    num_prompt_rows: float


class PromptLoad:
    """Running averages: the share of steps in which prompts ride, and how many rows of them."""

    def __init__(self) -> None:
        self.share = self.num_rows = 0.0

    def add(self, num_rows: int) -> None:
        self.share += ((num_rows > 0) - self.share) / MEMORY
        if num_rows:
            self.num_rows += (num_rows - self.num_rows) / (MEMORY if self.num_rows else 1)


class Ways:
    """sizes: (requests, rows) that were captured. A step takes those with the fewest requests that
    hold its own, of at least as many rows

    threshold: below which drafts stop; None: the one that pays, where the costs say what a level
    costs after the stop
    """

    def __init__(
        self, costs: StepCosts, sizes: Sequence[tuple[int, int]], threshold: float | None
    ) -> None:
        self._costs = costs
        self._sizes = sorted(set(sizes))
        self._rounds: dict[int, tuple[NDArray[Any], Floats]] = {}  # by requests
        self.times = StepTimes()
        self.of_many = threshold or 0.0  # where drafts of many stop, or nothing is known
        may_choose = threshold is None and costs.skipped_ms is not None
        self._of_few = THRESHOLDS if may_choose else (self.of_many,)

    @property
    def most_requests(self) -> int:
        return self._sizes[-1][0]

    def rounds(self, num_requests: int) -> tuple[NDArray[Any], Floats]:
        """[C] ascending rows that a round may have, and milliseconds with one level of drafts."""
        if num_requests not in self._rounds:
            fitting = [size for size in self._sizes if min(size) >= num_requests]
            if not fitting:
                raise ValueError(
                    f"num_requests={num_requests}: no captured shape (requests, rows) holds them; "
                    f"the largest is {self._sizes[-1]}"
                )
            rows = [rows for requests, rows in fitting if requests == fitting[0][0]]
            ms = [self._costs.round_ms(each) for each in rows]
            self._rounds[num_requests] = np.array(rows), np.array(ms)
        return self._rounds[num_requests]

    def rounds_with(self, num_requests: int, num_prompt_rows: int) -> tuple[NDArray[Any], Floats]:
        """List the rows that fill up a measured step beside prompts."""
        n, most = num_requests, int(self.rounds(num_requests)[0][-1])
        sizes = (rows - num_prompt_rows for rows, _ in self._costs.mixed or self._costs.rounds)
        rows = sorted({n, most, *(size for size in sizes if n < size < most)})
        ms = [self._costs.mixed_ms(each + num_prompt_rows) for each in rows]
        return np.array(rows), np.array(ms)

    def plain_ms(self, num_requests: int) -> float:
        kind = StepKind(num_requests, False, PLAIN)
        return float(self.times.ms(kind, self._costs.plain_ms(num_requests)))

    def plain(self, load: Load) -> Way:
        n = load.num_requests
        drafts_ms = self._costs.drafts_ms(PLAIN, n, 0.0)
        ms = self._mean_ms(load, PLAIN, np.array(n), self._costs.plain_ms(n), drafts_ms)
        return Way(PLAIN, n / float(ms))

    def chains(self, curves: list[GainCurve], load: Load) -> list[Way]:
        """Chains of all lengths, with the threshold that pays most where all drafts are verified.

        Other numbers of rows are looked at only for that one, which saves half a step.
        """
        n, num_drafting, *_ = load
        rows, ms = self.rounds(n)
        lengths = np.array(self._costs.chain_lengths(len(curves[0].means)))
        levels = lengths.astype(float)
        of_all = np.minimum(np.searchsorted(rows, n + num_drafting * levels), len(rows) - 1)

        def rates(curve: GainCurve) -> Floats:
            levels_ms = self._costs.levels_ms(n, levels, curve.levels_run[lengths - 1])
            step_ms = self._mean_ms(load, chain(1), rows[of_all], ms[of_all] + levels_ms, levels_ms)
            return np.asarray((n + num_drafting * curve.means[lengths - 1]) / step_ms)

        curve = max(curves, key=lambda each: rates(each).max()) if len(curves) > 1 else curves[0]
        levels_ms = self._costs.levels_ms(n, levels, curve.levels_run[lengths - 1])[:, None]
        step_ms = self._mean_ms(load, chain(1), rows, ms + levels_ms, levels_ms)
        gains = [curve.gains(each, rows - n, num_drafting) for each in lengths.tolist()]
        best = ((n + np.array(gains)) / step_ms).max(axis=1)
        return [
            Way(chain(i), rate, curve)
            for i, rate in zip(lengths.tolist(), best.tolist(), strict=True)
        ]

    def trees(
        self, shape: DraftShape, curves: list[GainCurve], load: Load, easier: float = 1.0
    ) -> Way:
        """Trees of which all nodes are verified, `easier` times as many as the curves say hold."""
        n, num_drafting, *_ = load
        num_rows = np.array(n * shape.rows)

        def way(curve: GainCurve) -> Way:
            drafts_ms = self._costs.drafts_ms(shape, n, float(curve.levels_run[-1]))
            alone_ms = self._costs.round_ms(n * shape.rows) + drafts_ms
            ms = float(self._mean_ms(load, shape, num_rows, alone_ms, drafts_ms))
            held = min(easier * float(curve.means[-1]), shape.levels)
            return Way(shape, (n + num_drafting * held) / ms, curve)

        return max(map(way, curves), key=lambda each: each.rate)

    def _mean_ms(
        self, load: Load, shape: DraftShape, rows: NDArray[Any], alone_ms: Any, drafts_ms: Any
    ) -> Floats:
        """Average steps without prompts and with them, less what the rows of these take.

        rows: that verify. alone_ms: of a step without prompts. drafts_ms: of its further levels
        """
        n, _, keys_ms, share, num_prompt_rows = load
        alone = self.times.ms(StepKind(n, False, shape), alone_ms)
        if share == 0:
            return np.asarray(alone + keys_ms)
        without, beside = self._costs.mean_mixed_ms(np.array([n, n + num_prompt_rows]))
        mixed = self._costs.mean_mixed_ms(rows + num_prompt_rows) + drafts_ms
        kind = StepKind(n, True, shape)
        ratio, _ = self.times.known(kind)
        mixed = self.times.ms(kind, mixed) - ratio * (beside - without)
        return np.asarray(alone + share * (mixed - alone) + keys_ms)

    def curves(self, sample: Sample, num_drafting: int) -> list[GainCurve]:
        """Return what a sample brings, for each threshold that may pay."""
        thresholds = self._of_few if num_drafting <= FEW else (self.of_many,)
        return [GainCurve(sample, each) for each in thresholds]


def index_of(rows: NDArray[Any], num_rows: int) -> int:
    """Find the smallest size that holds these rows, or the largest of all."""
    return min(int(np.searchsorted(rows, num_rows)), len(rows) - 1)
