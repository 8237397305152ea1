"""What a step may be: rows that verify and levels, with expected tokens and time.

One object serves all rounds of as many requests until the gains are estimated anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.gains import Floats, GainCurves
from specdec.scheduling.step_costs import RoundCosts

# With so many requests what drafts bring changes from one stretch of their texts to the next,
# sooner than it is noticed. With fewer, drafts stop where it pays; with more, it hardly changes.
UNSTEADY = range(5, 33)
NEARLY = 0.985  # of the best rate: what is enough, with fewer levels
# The part of its average time that a step with drafts and prompts takes, since its rows are chosen
# once its prompts are known. Fitted to closed loops of the scheduler over the costs of an H200.
FITTED = 0.97


class RequestCounts(NamedTuple):
    """How many requests verify, and how many of these may have drafts."""

    num_requests: int
    num_drafting: int


class RowSizes:
    """The rows that steps of a number of requests can have, from the captured shapes.

    shapes: (requests, rows). A step takes the shapes with the fewest requests that hold its own.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = sorted(set(shapes))
        self._by_requests: dict[int, NDArray[np.integer[Any]]] = {}

    @property
    def most_requests(self) -> int:
        return self._shapes[-1][0]

    def of(self, num_requests: int) -> NDArray[np.integer[Any]]:
        """[C] ascending rows; at least one for each request."""
        if num_requests not in self._by_requests:
            fitting = [s for s in self._shapes if min(s) >= num_requests]
            if not fitting:
                raise ValueError(
                    f"num_requests={num_requests}: no captured shape (requests, rows) holds them; "
                    f"the largest is {self._shapes[-1]}"
                )
            least = fitting[0][0]
            rows = [rows for requests, rows in fitting if requests == least]
            self._by_requests[num_requests] = np.array(rows)
        return self._by_requests[num_requests]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Expected tokens and milliseconds of steps of one kind; C row counts.

    rows: [C] ascending: that verify, of all requests
    tokens: [K, C] of a step whose drafts have 1 to K levels; -inf where a smaller size has a row
        for every draft
    ms: [C] a step that drafts one level; or [K, C], where it goes by the tokens
    levels_ms: [K] the further levels of 1 to K
    plain_ms: a step of one row each, no levels
    """

    num_requests: int
    rows: NDArray[np.integer[Any]]
    tokens: Floats
    ms: Floats
    levels_ms: Floats
    plain_ms: float

    def scaled(self, ratios: tuple[float, float]) -> "StepOptions":
        """Scale plain steps and drafting steps by their measured slowdowns."""
        without, with_drafts = ratios
        return replace(
            self,
            ms=self.ms * with_drafts,
            levels_ms=self.levels_ms * with_drafts,
            plain_ms=self.plain_ms * without,
        )

    def less(self, ms: float) -> "StepOptions":
        return replace(self, ms=self.ms - ms, plain_ms=max(self.plain_ms - ms, 0.0))

    def best_rows(self, num_live: int, next_levels: int, rate: float) -> int:
        """Rows that bring the most beyond what their time is worth at `rate`.

        Of one step, whose prompts are known: its ms are [C].
        """
        assert self.ms.ndim == 1, "options of steps on average"
        values = self.tokens[num_live - 1] - rate * self.ms
        if next_levels == 0:  # then a step of one row each is a plain one
            values[0] += rate * (self.ms[0] - self.plain_ms)
        return int(self.rows[values.argmax()])

    def best_at(self, rate: float) -> tuple[Floats, Floats]:
        """Tokens and milliseconds [K + 1] of the rows that bring the most at `rate`, by levels."""
        levels = np.arange(len(self.tokens))
        best = (self.tokens - rate * self.ms).argmax(axis=1)
        tokens = _behind(self.num_requests, self.tokens[levels, best])
        ms = self.ms[best] if self.ms.ndim == 1 else self.ms[levels, best]
        return tokens, _behind(self.plain_ms, ms + self.levels_ms)


@dataclass(frozen=True, slots=True)
class Riding:
    """Rows of prompts that ride in recent steps.

    Prompts come with the tokens that end requests, as many with each.

    share: of the steps, those with prompts
    num_rows: in one of these
    tokens: of a step
    """

    share: float = 0.0
    num_rows: int = 0
    tokens: float = 1.0

    def share_beside(self, tokens: Floats) -> Floats:
        """Share of steps of `tokens` tokens that have prompts: each token brings one by chance."""
        return np.asarray(1 - (1 - self.share) ** (tokens / self.tokens))

    def rows_beside(self, tokens: Floats) -> Floats:
        """Rows in one of these; asked only where the share is not 0."""
        every = self.share * self.num_rows * tokens / self.tokens
        return np.asarray(every / self.share_beside(tokens))


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What steps of these requests may be, without prompts and with as many as ride on average.

    Of steps with fewer tokens fewer have prompts, and what their rows take counts against no way to
    go on. Rates are those of the rest of the time.

    mixed: without the milliseconds that the rows of prompts take
    riding: where its share is 0, `mixed` is not looked at
    curves: that they were made with
    """

    rounds: StepOptions
    mixed: StepOptions
    curves: GainCurves
    riding: Riding = Riding()

    def steady(self, keys_ms: float, near: float = 0.0) -> tuple[int, float]:
        """(levels, tokens per millisecond) of the best of all ways to go on for ever.

        Of the milliseconds that prompts do not take. Each kind of step has rows of its own.
        Dinkelbach's method: at the best rate the most that tokens - rate * milliseconds can be is
        0, and every lower rate is raised by the choice that is best at it; at a higher one that
        choice has a rate of its own that is not too high. The search begins at `near`: the nearer,
        the sooner it ends. If it drafts, UNSTEADY requests take the fewest levels, at least one,
        whose rate is NEARLY the best, and more requests none, if that is: rates are estimates, and
        the greatest of several is often too high.
        """
        rate, may_be_high = near, True
        while True:
            tokens, ms = self._at(rate)
            ms = ms + keys_ms
            levels = int((tokens - rate * ms).argmax())
            # a plain step may cost no more than its prompts
            own = float(tokens[levels] / max(ms[levels], 1e-6))
            was_high = may_be_high and own < rate * (1 - 1e-9)
            if own <= rate * (1 + 1e-9) and not was_high:
                return self._fewest(levels, tokens >= rate * NEARLY * ms), max(rate, own)
            rate, may_be_high = own, False  # from here on it only rises

    def _fewest(self, most: int, is_near: NDArray[np.bool_]) -> int:
        """Levels whose rate is NEARLY that of `most` levels, or `most`."""
        n = self.rounds.num_requests
        if n >= UNSTEADY.stop:
            return 0 if is_near[0] else most
        fewer = range(1, most) if n in UNSTEADY else ()
        return next((levels for levels in fewer if is_near[levels]), most)

    def levels_at(self, rate: float, keys_ms: float) -> int:
        tokens, ms = self._at(rate)
        return int((tokens - rate * (ms + keys_ms)).argmax())

    def _at(self, rate: float) -> tuple[Floats, Floats]:
        tokens, ms = self.rounds.best_at(rate)
        if self.riding.share == 0:
            return tokens, ms
        mixed_tokens, mixed_ms = self.mixed.best_at(rate)
        most = _behind(self.rounds.num_requests, self.rounds.tokens.max(axis=1))
        share = self.riding.share_beside(most)
        return tokens + share * (mixed_tokens - tokens), ms + share * (mixed_ms - ms)


def _behind(first: float, rest: Floats) -> Floats:
    """Put `first` before `rest`: np.append is several times slower, and a plan needs dozens."""
    found = np.empty(len(rest) + 1)
    found[0], found[1:] = first, rest
    return found


def round_options(
    costs: RoundCosts, rows: NDArray[np.integer[Any]], curves: GainCurves, requests: RequestCounts
) -> StepOptions:
    """Steps without prompts. rows: [C] of the captured shapes."""
    ms = np.array([costs.verify_ms(each) for each in rows])
    plain_ms = costs.plain_ms(requests.num_requests)
    return _options(costs, rows, curves, requests, ms, plain_ms)


def tree_ms(
    costs: RoundCosts, num_requests: int, curves: GainCurves, num_prompt_rows: int
) -> float:
    """Price a round of trees whose drafts stop as the chains of these curves do.

    num_prompt_rows: that ride in it
    """
    assert costs.tree is not None, "costs of chains"
    shape = costs.tree.shape.of(num_requests)
    ms = costs.tree.ms(num_requests, float(curves.levels_run[shape.num_levels - 1]))
    num_rows = num_requests * shape.num_rows
    with_prompts = costs.mixed_ms(num_rows + num_prompt_rows) if num_prompt_rows else 0.0
    return ms + max(with_prompts - costs.verify_ms(num_rows), 0.0)


def mixed_options(
    costs: RoundCosts,
    most_rows: int,
    curves: GainCurves,
    requests: RequestCounts,
    num_prompt_rows: int,
) -> StepOptions:
    """List steps in which num_prompt_rows ride; rows that verify fill up a measured size.

    most_rows: that may verify
    """
    n = requests.num_requests
    sizes = (rows - num_prompt_rows for rows, _ in costs.mixed or costs.verify)
    # not np.unique, whose first call imports modules, while steps wait
    rows = np.array(sorted({n, most_rows, *(size for size in sizes if n < size < most_rows)}))
    ms = np.array([costs.mixed_ms(each + num_prompt_rows) for each in rows])
    plain_ms = max(float(ms[0]) - costs.level_ms(n), 0.0)
    return _options(costs, rows, curves, requests, ms, plain_ms)


def filling_options(
    costs: RoundCosts, rounds: StepOptions, ratios: tuple[float, float], riding: Riding
) -> StepOptions:
    """Steps of many requests in which prompts ride: as many rows as their own tokens bring.

    Drafts fill up what prompts leave of a measured size, and prompts what plain rows do. So on
    average a step takes a share of the time from one size to the next. What the rows of prompts
    take is left out at one price, whatever the steps.

    rounds: of the same requests, without prompts; riding: its share is not 0
    ratios: how many times as long steps without drafts take, and with them
    """
    n = rounds.num_requests
    without, with_drafts = ratios
    alone_ms, all_ms = _mean_mixed_ms(costs, np.array([n, n + riding.num_rows]))
    price = (all_ms - alone_ms) / max(riding.num_rows, 1)
    tokens = np.where(np.isfinite(rounds.tokens), rounds.tokens, n)  # -inf is never chosen
    prompts, beside_plain = riding.rows_beside(tokens), float(riding.rows_beside(np.array(n)))
    ms = with_drafts * _mean_mixed_ms(costs, rounds.rows + prompts) - price * prompts
    ms *= FITTED
    plain_ms = float(_mean_mixed_ms(costs, np.array(n + beside_plain))) - costs.level_ms(n)
    plain_ms = max(without * plain_ms - price * beside_plain, 0.0)
    levels_ms = with_drafts * rounds.levels_ms
    return replace(rounds, ms=ms, levels_ms=levels_ms, plain_ms=plain_ms)


def _mean_mixed_ms(costs: RoundCosts, num_rows: Floats) -> Floats:
    """Average steps with prompts whose rows vary around num_rows and fill the measured sizes."""
    rows, ms = np.array(costs.mixed or costs.verify).T
    inside = np.interp(num_rows, rows, ms)
    return np.asarray(np.where(num_rows > rows[-1], ms[-1] * num_rows / rows[-1], inside))


def _options(
    costs: RoundCosts,
    rows: NDArray[np.integer[Any]],
    curves: GainCurves,
    requests: RequestCounts,
    ms: Floats,
    plain_ms: float,
) -> StepOptions:
    n, num_drafting = requests
    gains = curves.gains(rows - n, num_drafting)
    levels = np.arange(1, len(gains) + 1)[:, None]
    is_held_by_smaller = rows[:-1] >= n + num_drafting * levels
    gains[:, 1:][is_held_by_smaller] = -np.inf
    return StepOptions(n, rows, n + gains, ms, levels_ms(costs, n, curves), plain_ms)


def levels_ms(costs: RoundCosts, num_requests: int, curves: GainCurves) -> Floats:
    """[K] milliseconds of 1 to K levels, those beyond the first."""
    num_run = curves.levels_run
    num_skipped = np.arange(1, len(num_run) + 1) - num_run
    run_ms = (num_run - 1) * costs.level_ms(num_requests)
    return np.asarray(run_ms + num_skipped * (costs.skipped_ms or 0.0))
