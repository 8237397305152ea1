"""What the kernels of a pass share of their arguments, each in the order of the parameters."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch_plan import Launch
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.query_tiles import Heads
from specdec.kernels.attention.workspace import Parts


class Pass(NamedTuple):
    """All that a kernel's arguments are made of, except for the tensors of a layer."""

    rows: QueryRows
    plan: Launch
    parts: Parts
    heads: Heads
    constants: Mapping[str, object]
    options: Mapping[str, object]

    @property
    def is_uniform(self) -> bool:
        """All batch slots have as many rows."""
        return self.rows.query_start_loc is None

    def requests(self) -> tuple[Tensor, ...]:
        """Their partial results, blocks, places and rows."""
        rows, parts = self.rows, self.parts
        starts = rows.positions if rows.query_start_loc is None else rows.query_start_loc
        return parts.acc, parts.stats, rows.block_table, rows.idx_mapping, rows.positions, starts

    def numbers(self) -> tuple[int | float, ...]:
        """Sizes, and the factor of scores."""
        R, M = self.rows.block_table.shape
        # times log2(e): the kernels take powers of 2
        scale = self.heads.C**-0.5 * 1.4426950408889634
        return self.rows.max_query_len, R - 1, M, self.parts.num_splits, scale

    def limits(self) -> tuple[int, ...]:
        """What tells long slots: see long_slots.py. Without helpers no kernel looks at it."""
        return len(self.rows.idx_mapping), launch_plan.ALONE_KEYS or 0, self.parts.num_long
