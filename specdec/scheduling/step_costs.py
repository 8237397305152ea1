"""What a step costs by its rows, and how many rows of prompts may ride in it.

On a GPU the figures are measured at the start (start/measure_costs.py); a test may give its own.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specdec.sizes import TreeShape

LEAST_PROMPT_ROWS = 64  # for the first prompt that waits, in every step
COMPUTE_BOUND = 256  # rows that verify: from here on each further row costs time
FEW_ROWS = 64  # one draft in this many rows may give way to prompts that end
RATIO_MEMORY = 1 / 64  # weight of the latest step in a ratio of times
AGING = 1 / 512  # weight of the latest step in the ratio of the other kinds of steps
KNOWN = 8  # steps that took as long as predicted, before any was measured
OUTLIER = 2.0  # a step counts as at most this many times longer or shorter than predicted
Measured = tuple[tuple[int, float], ...]  # (rows, milliseconds), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of steps, by all their rows with padding.

    rounds, mixed: steps without and with prompts, for short contexts. A step takes as long as the
        first count that holds its rows: that of a captured graph, or of its tiles
    level: each level of the draft after the first, by requests with padding; empty: the number of
        levels is fixed, and they are part of the above
    ms_per_key: for each key that a verifying request has in its cache
    ms_per_pair: for each row of a prompt and each key before it
    """

    rounds: Measured
    mixed: Measured
    level: Measured = ()
    ms_per_key: float = 0.0
    ms_per_pair: float = 0.0

    def round_ms(self, num_rows: int, num_keys: int) -> float:
        return _at(self.rounds, num_rows) + self.ms_per_key * num_keys

    def mixed_ms(self, num_rows: int, num_keys: int, num_pairs: int) -> float:
        """num_rows: of the whole step"""
        keys = self.ms_per_key * num_keys + self.ms_per_pair * num_pairs
        return _at(self.mixed, num_rows) + keys

    def sizes_above(self, num_rows: int) -> Iterator[int]:
        """Row counts that fill a measured step; beyond the largest, in steps of half of it."""
        largest = self.mixed[-1][0]
        beyond = range(largest, num_rows + 8 * largest, max(largest // 2, 1))[1:]
        sizes = itertools.chain((rows for rows, _ in self.mixed), beyond)
        yield from (rows for rows in sizes if rows > num_rows)


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
        every = _at(self.all_levels, num_requests)
        num_levels = self.shape.of(num_requests).num_levels
        if not self.one_level or num_levels == 1:
            return every
        one = _at(self.one_level, num_requests)
        return one + (num_run - 1) / (num_levels - 1) * max(every - one, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Milliseconds of steps in an engine whose number of drafts varies.

    verify: a round that drafts one level (target, choice, commit, draft prefill and first
        proposal), by rows with padding
    plain: a round of one row each that extends the draft's KV, by requests with padding
    level: each further level of the draft, by requests with padding
    skipped_ms: a level that is launched after all drafts have stopped; None: drafts never stop
    mixed: a step with prompts that drafts one level, by all rows with padding; empty: as `verify`
    ms_per_key: for each key in the caches of the requests that verify, in plain rounds too
    tree: of rounds of trees; None: no draft is one
    """

    verify: Measured
    plain: Measured
    level: Measured
    mixed: Measured = ()
    ms_per_key: float = 0.0
    skipped_ms: float | None = None
    tree: TreeCosts | None = None

    def verify_ms(self, num_rows: int) -> float:
        return _at(self.verify, num_rows)

    def mixed_ms(self, num_rows: int) -> float:
        return _at(self.mixed or self.verify, num_rows)

    def plain_ms(self, num_requests: int) -> float:
        return _at(self.plain, num_requests)

    def level_ms(self, num_requests: int) -> float:
        return _at(self.level, num_requests)


class Kind(IntEnum):
    """What a step does about drafts. TREE: it verifies trees. CHAIN: drafts, but no trees."""

    PLAIN = 0
    CHAIN = 1
    TREE = 2


class TimeRatios:
    """Ratios of measured to predicted step times, by load, prompts and drafts.

    Costs are measured alone, greedy and with empty caches; requests bring samplers, contexts and
    work for the host. The ratios are running averages, 1 where nothing is known. Loads from one
    power of two to the next count as one. Ratios of step kinds that are not running drift toward
    the one that is. Until a step with trees was seen, trees use the ratio of chains.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, Kind], tuple[int, float]] = {}  # steps, ratio

    def add(self, num_requests: int, has_prompts: bool, kind: Kind, ratio: float) -> None:
        load = num_requests.bit_length()
        count, known = self._known.get((load, has_prompts, kind), (0, 1.0))
        if kind is Kind.TREE and count == 0:
            known = self._ratio(load, has_prompts, Kind.TREE)
        weight = max(RATIO_MEMORY, 1 / (count + 1 + KNOWN))
        ratio = known + weight * (min(max(ratio, 1 / OUTLIER), OUTLIER) - known)
        self._known[load, has_prompts, kind] = count + 1, ratio
        for other in Kind:
            at = load, has_prompts, other
            if other != kind and at in self._known:
                count, known = self._known[at]
                self._known[at] = max(count - 1, 0), known + AGING * (ratio - known)

    def of(self, num_requests: int, has_prompts: bool) -> tuple[float, float]:
        """Return the ratios of plain steps and of steps with chains, to a 32nd."""
        load = num_requests.bit_length()
        plain, chain = (self._ratio(load, has_prompts, each) for each in (Kind.PLAIN, Kind.CHAIN))
        return round(32 * plain) / 32, round(32 * chain) / 32

    def of_trees(self, num_requests: int, has_prompts: bool) -> float:
        return self._ratio(num_requests.bit_length(), has_prompts, Kind.TREE)

    def _ratio(self, load: int, has_prompts: bool, kind: Kind) -> float:
        if kind is Kind.TREE and (load, has_prompts, kind) not in self._known:
            kind = Kind.CHAIN
        return self._known.get((load, has_prompts, kind), (0, 1.0))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBudget:
    """slowdown: how much longer than without prompts a step may take, unless more arrive."""

    costs: StepCosts
    slowdown: float

    def rows(
        self, num_verify_rows: int, num_keys: int, start: int, num_arriving: float = 0.0
    ) -> int:
        """Bound the rows of prompts that may ride with rows that verify.

        num_keys: in the caches of the requests that verify. start: of the first prompt's next part.
        num_arriving: rows of prompts that arrive with each step on average; at least these may
        ride, so the queue cannot grow without bound.
        """
        limit = self.slowdown * self.costs.round_ms(num_verify_rows, num_keys)
        best = 0
        for size in self.costs.sizes_above(num_verify_rows):
            rows = size - num_verify_rows
            pairs = rows * start + rows * rows // 2
            is_slow = self.costs.mixed_ms(size, num_keys, pairs) > limit
            if is_slow and max(best, LEAST_PROMPT_ROWS) >= num_arriving:
                break
            best = rows
        return max(best, LEAST_PROMPT_ROWS)

    def verified(self, num_rows: int, num_requests: int, num_ends: int) -> int:
        """Reduce the rows that verify beside prompts that end.

        The head multiplies them and a row for each of these prompts. In tiles for more rows it
        takes up to a third longer, which is more than a few of the least probable drafts can bring.
        """
        sizes = (rows for rows, _ in self.costs.rounds if rows >= max(num_rows, COMPUTE_BOUND))
        kept = max(next(sizes, num_rows + num_ends) - num_ends, num_requests)
        return kept if num_rows - num_rows // FEW_ROWS <= kept < num_rows else num_rows

    def fitting(
        self,
        num_verify_rows: int,
        num_requests: int,
        left: Sequence[int],
        num_due: int = 1,
        is_patient: bool = False,
    ) -> int:
        """Reduce the rows of prompts that ride to those that pay.

        A step's time goes by the measured size that holds it, so the last rows may pay for many
        that are padding. They wait for the next step where the size below is so much cheaper that
        they can run there, the prompts that would have ended can go without a round, and time is
        left. Prompts that are due never wait.

        num_requests: that verify. left: rows of each prompt, in order
        num_due: the first prompts, which are due
        is_patient: all smaller sizes are considered, not only the next one
        """
        wanted = sum(left)
        num_rows = num_verify_rows + wanted
        sizes = [rows for rows, _ in self.costs.mixed]
        i = bisect.bisect_left(sizes, num_rows)
        if i in (0, len(sizes)) or (sizes[i] == num_rows and not is_patient):
            return wanted
        round_ms = self.costs.round_ms(num_verify_rows, 0)
        size, ms = self.costs.mixed[i]
        row_ms = max(ms - round_ms, 0.0) / (size - num_verify_rows)
        least = max(sum(left[:num_due]), 1)
        best_ms, best = ms, wanted
        for size, ms in self.costs.mixed[0 if is_patient else i - 1 : i]:
            kept = size - num_verify_rows
            if kept >= least:
                num_late = sum(end > kept for end in itertools.accumulate(left))
                ms += (wanted - kept) * row_ms + num_late * round_ms / num_requests
                best_ms, best = min((best_ms, best), (ms, kept))
        return best


def _at(measured: Measured, num_rows: int) -> float:
    """Take the first count that holds these rows; beyond the largest, time grows in proportion."""
    for rows, ms in measured:
        if num_rows <= rows:
            return ms
    rows, ms = measured[-1]
    return ms * num_rows / rows
