"""What the draft's levels leave where nodes may be siblings: candidates, and rows of each level.

Until the step ends, keys and values of these rows lie in scratch blocks after the pool, by slot.
"""

import torch
from torch import Tensor

from specdec.sizes import DraftShape


class Candidates:
    """Letters: B batch slots, k rows of a level, M candidates of all levels.

    max_reqs: batch slots that may draft them, 0 in engines that draft chains alone
    first_slot: the first cache slot after the pool
    """

    def __init__(
        self, shape: DraftShape, max_reqs: int, first_slot: int, device: torch.device
    ) -> None:
        B = max_reqs
        k = shape.width
        M = k + k * k * (shape.levels - 1)
        self.shape = shape
        self.first_slot = first_slot

        def integers(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self.tokens = integers(B, M)  # [B, M]
        self.scores = torch.zeros(B, M, device=device)  # [B, M] of their paths
        self.places = integers(B, M)  # [B, M] of their parents among them; see rank.py
        self.row_places = integers(B, k)  # [B, k] of the level's rows among the candidates
        self.parent_rows = integers(B * k)  # [B x k] among the rows of the level before
        self.rows = integers(B, M)  # [B, M] of all candidates, 0 = not kept; for the kernel
        # [B x k, levels] of the rows' ancestors, and their own
        self.path_slots = integers(B * k, shape.levels)
        self.starts = integers(B)  # [B] position of the first level's rows

    def level_slots(self, num_reqs: int, level: int) -> Tensor:
        """The draft's cache slots [B, k] of the rows of a level, 0 for the first one."""
        k = self.shape.width
        slot_B1 = torch.arange(num_reqs, device=self.tokens.device)[:, None]
        row_k = torch.arange(level * k, (level + 1) * k, device=self.tokens.device)
        return self.first_slot + slot_B1 * k * (self.shape.levels - 1) + row_k

    def fill_padding(self) -> None:
        """Make all rows padding, which sees one slot that no request owns, to capture graphs."""
        self.starts.zero_()
        self.path_slots.fill_(self.first_slot)
