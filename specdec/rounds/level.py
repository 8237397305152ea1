"""One level of a draft: where its nodes go, and the rows of the level after it.

A level of width k gives k children to each of its rows: one row per request in the first level, k
rows in every further one. Width 1 is a chain. The rows of level j (0, 1, ...) have position
num_computed - 1 + j: those of level 0 are seeds, the last committed pairs. The rows after them
embed tokens at the next position; beyond the context they are padding (position 0, slot -1).
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevel:
    """Say what the level is of, and what follows it.

    level: None: the level after those that buffers.draft_levels counts, of width 1
    shape: of the whole draft, at most what its buffers have room for
    d2t_W: target ids of the draft's, None: the draft has the target's ids
    calibration: [2, K] factor of the odds by level, of greedy and of sampled requests, for the
        probabilities of width 1; None: it has none
    threshold: [1] see stop.py; None: no slot stops
    """

    buffers: StepBuffers
    state: RequestState
    level: int | None
    shape: DraftShape
    d2t_W: Tensor | None
    max_model_len: int
    calibration: Tensor | None = None
    threshold: Tensor | None = None

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def rows_per_req(self) -> int:
        """Count the rows of a request that get children."""
        return 1 if self.level == 0 else self.width

    @property
    def is_last(self) -> bool:
        return self.level is not None and self.level + 1 == self.shape.levels

    @property
    def first_place(self) -> int:
        """Find the first of the level's nodes among the nodes of all levels."""
        assert self.level is not None, "a level of its own, of width 1"
        return self.width + self.width**2 * (self.level - 1) if self.level > 0 else 0
