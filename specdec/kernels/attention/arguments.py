"""What the kernels of a pass share: room for partial results, and arguments.

Arguments come in the order of the parameters.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch_plan import HeadShape, Launch, keys_of_window
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.splits import num_splits


class Parts(NamedTuple):
    """Room for partial results: of every row of a pass, or of the rows of its first long slots.

    Once they are added up, their values may be anything (kept.py).
    """

    acc: Tensor  # [rows, H, num_splits, C] float32, and all else
    stats: Tensor  # [rows, H, num_splits, 2] float32
    num_splits: int
    num_long: int  # long slots that have room and teams, at most


class Pass(NamedTuple):
    """What a kernel's arguments are made of, except for the tensors of a layer."""

    rows: QueryRows
    plan: Launch
    parts: Parts
    heads: HeadShape
    scale: float  # of scores
    constants: Mapping[str, object]
    options: Mapping[str, object]

    @property
    def most_splits(self) -> int:
        """Bound the splits that a query tile sees."""
        if self.heads.window is None:
            return self.parts.num_splits
        # no split is shorter than a tile
        keys = keys_of_window(self.heads.window, self.plan.tokens)
        return min(self.parts.num_splits, -(-keys // 64) + 1)

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
        scale = self.scale * 1.4426950408889634
        return self.rows.max_query_len, R - 1, M, self.parts.num_splits, scale

    def limits(self) -> tuple[int, ...]:
        """List what tells long slots: see shared_splits.py. Elsewhere no kernel looks at it."""
        return len(self.rows.idx_mapping), launch_plan.ALONE_KEYS or 0, self.parts.num_long


def workspace_size(num_rows: int, num_heads: int, head_dim: int, max_seq_len: int) -> int:
    """Count elements for the partial results of rows: values, peak and total of each split."""
    return num_rows * num_heads * num_splits(max_seq_len) * (head_dim + 2)


def room_for_parts(rows: QueryRows, plan: Launch, H: int, C: int, device: torch.device) -> Parts:
    """Take room in the workspace; rows that need more than it has get memory of their own."""
    splits = num_splits(rows.max_seq_len)
    num_rows, num_long = rows.num_rows, 0
    if plan.is_helped:
        num_long = min(_long_slots_with_room(rows, H, C), plan.teams)
        num_rows = num_long * rows.max_query_len
    elif not plan.is_split:  # with paths all shared splits are one, and paths reach two more
        splits = 3 if rows.paths is not None else 0
    size = max(num_rows * H * splits * (C + 2), 1)
    acc = rows.workspace
    if acc is None or acc.numel() < size:
        acc = torch.empty(size, dtype=torch.float32, device=device)
    return Parts(acc, acc[num_rows * H * splits * C :], splits, num_long)


def _long_slots_with_room(rows: QueryRows, H: int, C: int) -> int:
    """Count the long slots that the workspace holds; without one, all."""
    B = len(rows.idx_mapping)
    if rows.workspace is None:
        return B
    size = workspace_size(rows.max_query_len, H, C, rows.max_seq_len)
    return min(B, rows.workspace.numel() // size)
