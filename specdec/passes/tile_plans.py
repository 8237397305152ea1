"""Query tiles of the attention twin: kept for uniform batches, laid out anew for ragged ones.

A full graph reads the plan of its own shape each time. The plan of a ragged batch lies in static
memory, since a graph in pieces may be told to check addresses.
"""

from collections.abc import Sequence

import torch

from specdec.kernels.invariant import ROWS
from specdec.kernels.paged_attention import TilePlan, plan_tiles
from specdec.stepping.upload import upload

CPU = torch.device("cpu")


class TilePlans:
    def __init__(self, max_tokens: int, max_reqs: int) -> None:
        num_tiles = max_tokens // ROWS + max_reqs
        self._rows = torch.zeros(num_tiles * ROWS, dtype=torch.int64)
        self._reqs = torch.zeros(num_tiles, dtype=torch.int64)
        self._uniform: dict[tuple[int, int], TilePlan] = {}

    def uniform(self, num_reqs: int, query_len: int) -> TilePlan:
        """The plan of batch slots with the same number of rows each."""
        key = num_reqs, query_len
        if key not in self._uniform:
            self._uniform[key] = plan_tiles((query_len,) * num_reqs, num_reqs * query_len, CPU)
        return self._uniform[key]

    def ragged(self, query_lens: Sequence[int], num_rows: int) -> TilePlan:
        """The plan of any batch; it lasts until the next one is asked for."""
        plan = plan_tiles(query_lens, num_rows, CPU)
        upload(self._rows, plan.rows)
        upload(self._reqs, plan.reqs)
        return TilePlan(self._rows[: len(plan.rows)], self._reqs[: len(plan.reqs)], num_rows)
