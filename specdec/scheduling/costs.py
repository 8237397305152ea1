"""What a step costs by its rows, and how many rows of prompts may ride in it.

On a GPU the figures are measured at the start (start/measure_costs.py); a test may give its own.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from specdec.sizes import PLAIN, DraftShape, TreeShape

LEAST_PROMPT_ROWS = 64  # for the first prompt that waits, in every step
MEMORY = 64  # steps that running averages remember
RATIO_AGING = 512  # steps in which the ratio of a kind that does not run forgets
LEAST_WAIT = 1 / 32  # of a step: where the host waits less, the device may have waited for it
Floats = NDArray[np.floating[Any]]
Measured = tuple[tuple[int, float], ...]  # (rows, milliseconds), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCosts:
    """Milliseconds of rounds that verify and draft trees, by requests with padding.

    all_levels: rounds whose drafts never stop, for short contexts
    one_level: rounds whose drafts stop after one level; empty: drafts never stop
    shape: of the trees
    """

    all_levels: Measured
    one_level: Measured = ()
    shape: TreeShape

    def ms(self, num_requests: int, num_run: float) -> float:
        """num_run: the levels that run on average, at least 1"""
        every = ms_at(self.all_levels, num_requests)
        num_levels = self.shape.of(num_requests).num_levels
        if not self.one_level or num_levels == 1:
            return every
        one = ms_at(self.one_level, num_requests)
        return one + (num_run - 1) / (num_levels - 1) * max(every - one, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of steps, by all their rows with padding.

    A step takes as long as the first count that holds its rows: that of a graph, or of its tiles.

    rounds, mixed: steps without and with prompts, for short contexts; no `mixed`: as `rounds`.
        Where the number of levels varies, steps that draft one level of chains, or no block
    level: each further level, by requests with padding
    blocks: (tokens, what the block that proposes them takes, by requests with padding), ascending;
        of P-EAGLE that proposes those after the first. Empty: drafts are made level by level
    plain: a round of one row each that drafts nothing, by requests with padding
    skipped_ms: a level that is launched after all drafts have stopped; None: drafts never stop
    tree: rounds of trees where drafts may be both; None: no draft is one
    ms_per_key: for each key that a verifying request has in its cache
    ms_per_pair: for each row of a prompt and each key before it
    """

    rounds: Measured
    mixed: Measured = ()
    level: Measured = ()
    blocks: tuple[tuple[int, Measured], ...] = ()
    plain: Measured = ()
    skipped_ms: float | None = None
    tree: TreeCosts | None = None
    ms_per_key: float = 0.0
    ms_per_pair: float = 0.0

    def round_ms(self, num_rows: int) -> float:
        return ms_at(self.rounds, num_rows)

    def mixed_ms(self, num_rows: int) -> float:
        """num_rows: of the whole step"""
        return ms_at(self.mixed or self.rounds, num_rows)

    def mean_mixed_ms(self, num_rows: Floats) -> Floats:
        """Average steps with prompts whose rows vary around num_rows."""
        rows, ms = _columns(self.mixed or self.rounds)
        beyond = np.maximum(num_rows / rows[-1], 1)
        return np.asarray(np.interp(num_rows, rows, ms) * beyond)

    def plain_ms(self, num_requests: int) -> float:
        return ms_at(self.plain, num_requests)

    def chain_lengths(self, most: int) -> Sequence[int]:
        """List how many tokens, at most this many, a chain may have."""
        return [tokens for tokens, _ in self.blocks] or range(1, most + 1)

    @overload
    def levels_ms(self, num_requests: int, num_levels: float, num_run: float) -> float: ...

    @overload
    def levels_ms(self, num_requests: int, num_levels: Floats, num_run: Floats) -> Floats: ...

    def levels_ms(self, num_requests: int, num_levels: Any, num_run: Any) -> Any:
        """Price a chain's levels beyond the first, which is part of a round; or its whole block.

        num_run: levels until drafts stop, on average; the others are launched and skipped
        """
        if self.blocks:
            tokens = [0, *(tokens for tokens, _ in self.blocks)]
            ms = np.array([0.0, *(ms_at(measured, num_requests) for _, measured in self.blocks)])
            return ms[np.searchsorted(tokens, num_levels)]
        level_ms, skipped_ms = ms_at(self.level, num_requests), self.skipped_ms or 0.0
        return (num_run - 1) * level_ms + (num_levels - num_run) * skipped_ms

    def drafts_ms(self, shape: DraftShape, num_requests: int, num_run: float) -> float:
        """Price what drafts of this shape add to a round of the same rows; see `rounds`."""
        if shape.width > 1 and self.tree is not None:
            rows = num_requests * shape.rows
            return self.tree.ms(num_requests, num_run) - self.round_ms(rows)
        return self.levels_ms(num_requests, float(shape.levels), num_run)

    def sizes_above(self, num_rows: int) -> Iterator[int]:
        """Row counts that fill a measured step; beyond the largest, in steps of half of it."""
        measured = self.mixed or self.rounds
        largest, half = measured[-1][0], max(measured[-1][0] // 2, 1)
        sizes = itertools.chain((rows for rows, _ in measured), itertools.count(largest, half))
        yield from (rows for rows in sizes if rows > num_rows)


class StepKind(NamedTuple):
    """What makes steps as long as their costs say, or longer: loads, prompts, and drafts.

    shape: of the drafts that a step verifies, and makes
    """

    num_requests: int
    has_prompts: bool
    shape: DraftShape

    @property
    def load(self) -> tuple[int, bool]:
        """Loads from one power of two to the next count as one."""
        return self.num_requests.bit_length(), self.has_prompts

    @property
    def drafts(self) -> int:
        return 0 if self.shape == PLAIN else self.shape.width


class StepTimes:
    """Corrects predicted times of steps by measured ones.

    A step takes the device the predicted time times a ratio, a running average: costs are measured
    greedily and with empty caches. But none is shorter than what the host does for it, which takes
    longer where a model is small. What is known of drafts that do not run drifts toward what holds
    for those that do; the host's time only falls so. Trees that have not run have the ratio of
    chains.
    """

    def __init__(self) -> None:
        # by load, then by drafts
        self._ratios: dict[tuple[int, bool], dict[int, float]] = {}
        self._host_ms: dict[tuple[int, bool], dict[int, float]] = {}

    def add(self, kind: StepKind, predicted: float, measured: float, host_ms: float) -> None:
        """host_ms: of the measured time, in which the host did not wait for results"""
        of_host = self._host_ms.setdefault(kind.load, {})
        before = of_host.get(kind.drafts, min(host_ms, predicted))  # the first may be an outlier
        latest = before + (min(host_ms, 2 * before) - before) / MEMORY
        for drafts, known in of_host.items():
            of_host[drafts] = known + (min(latest, known) - known) / RATIO_AGING
        of_host[kind.drafts] = latest
        if host_ms > (1 - LEAST_WAIT) * measured:  # what the device needs is not known
            return
        ratios = self._ratios.setdefault(kind.load, {})
        before = self._ratio(kind)
        inside = min(max(measured / predicted, before / 2), 2 * before)  # an outlier counts little
        latest = before + (inside - before) / MEMORY
        for drafts, ratio in ratios.items():
            ratios[drafts] = ratio + (latest - ratio) / RATIO_AGING
        ratios[kind.drafts] = latest

    def known(self, kind: StepKind) -> tuple[float, float]:
        """Return the ratio and the host's milliseconds."""
        return self._ratio(kind), self._host_ms.get(kind.load, {}).get(kind.drafts, 0.0)

    def ms(self, kind: StepKind, predicted: Any) -> Any:
        """Correct the predicted milliseconds of one step or of several."""
        ratio, host_ms = self.known(kind)
        return np.maximum(ratio * predicted, host_ms)

    def _ratio(self, kind: StepKind) -> float:
        ratios = self._ratios.get(kind.load, {})
        return ratios.get(kind.drafts, ratios.get(1, 1.0) if kind.drafts > 1 else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBudget:
    """slowdown: how much longer than without prompts a step may take, unless more arrive."""

    costs: StepCosts
    slowdown: float

    def rows(
        self, num_verify_rows: int, num_keys: int, start: int, num_arriving: float, most: int
    ) -> int:
        """Bound the rows of prompts that may ride with rows that verify, at most `most`.

        num_keys: in the caches of the requests that verify. start: of the first prompt's next part.
        num_arriving: rows of prompts that arrive with each step on average; at least these may
        ride, so the queue cannot grow without bound.
        """
        keys_ms = self.costs.ms_per_key * num_keys
        limit = self.slowdown * (self.costs.round_ms(num_verify_rows) + keys_ms)
        best = 0
        for size in self.costs.sizes_above(num_verify_rows):
            rows = size - num_verify_rows
            pairs = rows * start + rows * rows // 2
            ms = self.costs.mixed_ms(size) + keys_ms + self.costs.ms_per_pair * pairs
            is_slow = ms > limit and max(best, LEAST_PROMPT_ROWS) >= num_arriving
            if is_slow or best >= most:
                break
            best = rows
        return min(max(best, LEAST_PROMPT_ROWS), most)


@cache
def _columns(measured: Measured) -> tuple[Floats, Floats]:
    rows, ms = np.array(measured).T
    return rows, ms


def ms_at(measured: Measured, num_rows: int) -> float:
    """Take the first count that holds these rows; beyond the largest, time grows in proportion."""
    for rows, ms in measured:
        if num_rows <= rows:
            return ms
    rows, ms = measured[-1]
    return ms * num_rows / rows
