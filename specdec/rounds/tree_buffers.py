"""Buffers of draft trees: the paths of the rows that a step verifies, and the levels of the next.

Nodes have no place in their requests' blocks, since siblings share a position. Their keys and
values lie in scratch blocks after the pool, by batch slot: those of the target's rows until the
accepted path is committed, those of the draft's levels until the step ends.
"""

import torch
from torch import Tensor

from specdec.sizes import BLOCK_SIZE, TreeShape


class TreeBuffers:
    """Letters: B batch slots, N rows of each, D nodes of a path, k rows of a level, M candidates.

    max_reqs: batch slots that may have a tree; max_tokens: rows of a step
    first_block: the first one after the pool, in the caches of both models
    results: the columns of a step's results from the first verified draft on
    """

    def __init__(
        self, shape: TreeShape, max_reqs: int, max_tokens: int, first_block: int, results: Tensor
    ) -> None:
        B = max_reqs
        D = shape.max_depth
        k = shape.top_k
        M = shape.num_candidates
        X = shape.num_nodes
        T = B * shape.num_rows
        device = results.device
        self.shape = shape
        self.first_slot = first_block * BLOCK_SIZE

        def integers(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        # results of rounds that verify trees
        self.verified_nodes = results[:B, :X]  # [B, N - 1] tokens
        self.num_verified = results[:B, X]  # [B] those that had a row, 0..N - 1
        # [B, N - 1] the row of each node's parent within the slot, -1 = had no row
        self.verified_parents = results[:B, X + 1 :][:, :X]
        # [B, N - 1] the draft's own probability of each node's path, times CONFIDENCE_ONE
        self.verified_probs = results[:B, 2 * X + 1 :][:, :X]

        # rows that verify
        self.parents = integers(T)  # [T] row within its slot; the root's is itself
        self.path_rows = integers(T, D + 1)  # [T, D + 1] row of the step by depth, -1 after it
        self.path_slots = integers(T, D + 1)  # [T, D + 1] the cache slot of each of these
        self.path_starts = integers(B)  # [B] position of the root
        self.walked = integers(B, D + 1)  # [B, D + 1] accepted rows within the slot, -1 after them

        # of paths as long as those of the step, one slot after another
        # accepted rows of the step, 0 after them, then rows of prompts
        self.path_sources = integers(max(max_tokens, B * (D + 1)))
        self.moved_from = integers(B * D)  # cache slots of accepted nodes, -1 = none
        self.moved_to = integers(B * D)  # where they go

        # what the draft grows
        self.tokens = integers(B, M)  # [B, M] of all candidates
        self.scores = torch.zeros(B, M, device=device)  # [B, M] of their paths
        self.places = integers(B, M)  # [B, M] of their parents among them; see rounds/rank.py
        self.row_places = integers(B, k)  # [B, k] of the level's rows among the candidates
        self.parent_rows = integers(B * k)  # [B x k] among the rows of the level before
        self.rows = integers(B, M)  # [B, M] of all candidates, 0 = not kept; for the kernel
        # [B x k, levels] of the rows' ancestors, and their own
        self.draft_path_slots = integers(B * k, shape.num_levels)
        self.draft_starts = integers(B)  # [B] position of the first level's rows
        self.proposed_nodes = integers(B, X)  # [B, N - 1] tokens proposed in this step
        self.proposed_parents = integers(B, X)  # [B, N - 1] the rows of their parents

    def node_slots(self, num_reqs: int) -> Tensor:
        """The target's cache slots [B, N - 1] of the nodes."""
        X = self.shape.num_nodes
        first = self.first_slot
        device = self.parents.device
        return torch.arange(first, first + num_reqs * X, device=device).view(num_reqs, X)

    def level_slots(self, num_reqs: int, level: int) -> Tensor:
        """The draft's cache slots [B, k] of the rows of a level, 0 for the first one."""
        k = self.shape.top_k
        slot_B1 = torch.arange(num_reqs, device=self.parents.device)[:, None]
        row_k = torch.arange(level * k, (level + 1) * k, device=self.parents.device)
        return self.first_slot + slot_B1 * self.shape.num_draft_rows + row_k

    def fill_padding(self) -> None:
        """Make all rows padding, which sees one slot that no request owns, to capture graphs."""
        for starts in (self.path_starts, self.draft_starts):
            starts.zero_()
        for slots in (self.path_slots, self.draft_path_slots):
            slots.fill_(self.first_slot)
