"""The query rows of a step, and where the keys of each lie."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from specdec.kernels.invariant import ROWS

LISTED_ROWS = ROWS  # the twin's query tiles are the same

# by kind of attention, the kernels of each layer of that kind
Launches = dict[Hashable, list[Callable[..., None]]]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The rows of the step that form the twin's query tiles, and the batch slot of each tile."""

    rows: Tensor  # [tiles x 8] int64 row of the step, T = no row
    reqs: Tensor  # [tiles] int64 batch slot
    num_rows: int  # T


def plan_tiles(query_lens: Sequence[int], num_rows: int, device: torch.device) -> TilePlan:
    """Cut consecutive runs of rows, one per batch slot, into tiles of 8."""
    rows: list[int] = []
    reqs: list[int] = []
    start = 0
    for req, length in enumerate(query_lens):
        tiles = -(-length // ROWS)
        rows += [*range(start, start + length), *[num_rows] * (tiles * ROWS - length)]
        reqs += [req] * tiles
        start += length
    return TilePlan(torch.tensor(rows, device=device), torch.tensor(reqs, device=device), num_rows)


@cache
def uniform_tiles(num_slots: int, query_len: int, num_rows: int, device: torch.device) -> TilePlan:
    """Plan the tiles of batch slots that have the same number of rows: once, for all steps."""
    return plan_tiles((query_len,) * num_slots, num_rows, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the last keys of each row lie: those at positions starts .. position of the row.

    slots:  entry j is the cache slot of the key at position starts + j, -1 after the row's own
    starts: for each batch slot, at most the position of its first row
    """

    slots: Tensor  # [T, D + 1]
    starts: Tensor  # [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRows:
    """Where the query rows of a step are. Tensors are static buffers or slices of them.

    query_start_loc: None where all batch slots have max_query_len rows
    max_query_len:   host-side bound on the rows of a batch slot
    usual_query_len: rows of most batch slots, where they have any number up to the bound; None: it
    max_seq_len:     host-side bound on positions + 1
    paths:           None where each row's keys are all in its request's blocks
    is_beside:       launched right after other rows of the same pass, whose results are not read
    listed:          the query tiles, of LISTED_ROWS rows at most, where a graph serves any; [X, 3]:
                     batch slot, first row, and the row after the slot's last. A first row below 0
                     is -1 - i for tile i of a slot whose rows query_start_loc tells. A tile from
                     row 0 to 0 has no row
    """

    block_table: Tensor  # [R + 1, M] blocks by state row; the last row is scratch
    idx_mapping: Tensor  # [B] state row per batch slot, -1 = padding
    positions: Tensor  # [T] 0 = padding
    query_start_loc: Tensor | None = None  # [B + 1] first row of each batch slot
    max_query_len: int = 1
    usual_query_len: int | None = None
    max_seq_len: int
    tiles: TilePlan | None = None  # the twin's query tiles; None: it plans them
    paths: Paths | None = None
    is_beside: bool = False
    listed: Tensor | None = None
    workspace: Tensor | None = None  # float32, for partial results: see workspace_size
    # of a kind once its first layer has been launched
    launches: Launches = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Count the rows, padding included."""
        return self.positions.shape[0]

    def with_launches(self, launches: Launches) -> "QueryRows":
        """Share these kernels, to which first launches of other kinds of layers add theirs."""
        rows = replace(self)
        object.__setattr__(rows, "launches", launches)
        return rows
