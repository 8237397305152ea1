"""The arguments that the kernels of a pass share, each in the order of the parameters."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch_plan import Launch
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.query_tiles import HeadShape
from specdec.kernels.attention.workspace import Parts


class Pass(NamedTuple):
    """What a kernel's arguments are made of, except for the tensors of a layer."""

    rows: QueryRows
    plan: Launch
    parts: Parts
    heads: HeadShape
    constants: Mapping[str, object]
    options: Mapping[str, object]

    @property
    def is_uniform(self) -> bool:
        return self.rows.query_start_loc is None

    def requests(self) -> tuple[Tensor, ...]:
        """List the arguments for requests: partial results, blocks, places and rows."""
        rows, parts = self.rows, self.parts
        starts = rows.positions if rows.query_start_loc is None else rows.query_start_loc
        return parts.acc, parts.stats, rows.block_table, rows.idx_mapping, rows.positions, starts

    def numbers(self) -> tuple[int | float, ...]:
        """List sizes, and the factor of scores."""
        R, M = self.rows.block_table.shape
        # times log2(e): the kernels take powers of 2
        scale = self.heads.C**-0.5 * 1.4426950408889634
        return self.rows.max_query_len, R - 1, M, self.parts.num_splits, scale

    def limits(self) -> tuple[int, ...]:
        """List what tells long slots: see shared_splits.py. Elsewhere no kernel looks at it."""
        return len(self.rows.idx_mapping), launch_plan.ALONE_KEYS or 0, self.parts.num_long
