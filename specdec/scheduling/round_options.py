"""What a round may be: rows of the captured shapes and levels, with expected tokens and time.

One object serves all rounds of as many requests until the gains are estimated anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.gains import Floats, GainCurves
from specdec.scheduling.step_costs import RoundCosts


class RowSizes:
    """The rows that steps of a number of requests can have, from the captured shapes.

    shapes: (requests, rows). A step takes the shapes with the fewest requests that hold its own.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = sorted(set(shapes))
        self._by_requests: dict[int, NDArray[np.integer[Any]]] = {}

    @property
    def most_requests(self) -> int:
        """Of the largest shape."""
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
class RoundOptions:
    """Expected tokens and milliseconds; C captured row counts.

    rows: [C] ascending
    tokens: [K, C] of a round whose drafts have 1 to K levels; -inf where a smaller size has a row
        for every draft
    verify_ms: [C] a round that drafts one level
    round_ms: [K, C] a round that drafts 1 to K levels
    plain_ms: a round of one row each, no levels
    """

    num_requests: int
    rows: NDArray[np.integer[Any]]
    tokens: Floats
    verify_ms: Floats
    round_ms: Floats
    plain_ms: float

    def steady(self, keys_ms: float) -> tuple[int, float]:
        """(levels, tokens per millisecond) of the best of all rounds that repeat for ever."""
        rates = self.tokens / (self.round_ms + keys_ms)
        best = int(rates.argmax())
        plain = self.num_requests / (self.plain_ms + keys_ms)
        rate = float(rates.flat[best])
        return (best // len(self.rows) + 1, rate) if rate > plain else (0, plain)

    def best_rows(self, num_live: int, next_levels: int, rate: float) -> int:
        """Rows that bring the most beyond what their time is worth at `rate`."""
        values = self.tokens[num_live - 1] - rate * self.verify_ms
        if next_levels == 0:  # then a round of one row each is a plain one
            values[0] += rate * (self.verify_ms[0] - self.plain_ms)
        return int(self.rows[values.argmax()])


def round_options(
    costs: RoundCosts, sizes: RowSizes, curves: GainCurves, num_requests: int, num_drafting: int
) -> RoundOptions:
    """All that a step of these requests may be, num_drafting of which may have drafts."""
    rows = sizes.of(num_requests)
    gains = curves.gains(rows - num_requests, num_drafting)
    levels = np.arange(1, len(gains) + 1)[:, None]
    is_held_by_smaller = rows[:-1] >= num_requests + num_drafting * levels
    gains[:, 1:][is_held_by_smaller] = -np.inf
    verify_ms = np.array([costs.verify_ms(each) for each in rows])
    return RoundOptions(
        num_requests,
        rows,
        num_requests + gains,
        verify_ms,
        verify_ms + (levels - 1) * costs.level_ms(num_requests),
        costs.plain_ms(num_requests),
    )
