"""Static buffers of the current step, allocated once: filled from the state, used by the graphs.

Letters: T rows of the largest step, B batch slots, Q = K + 1 rows of the longest path, X nodes of
the widest draft, L rows of its widest level, D hidden size, E width of the aux hidden states. Where
nodes may be siblings, W batch slots may verify them, and P is the number of their rows; elsewhere
both are 0.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.rounds.short import SHORT_ROWS, num_listed_tiles
from specdec.rounds.upload import upload
from specdec.sizes import DraftShape, EngineSizes

CONFIDENCE_ONE = 1 << 24  # of a probability as an integer; that of a live node is at least 1


class ResultColumns(NamedTuple):
    """The columns of a step's results, on the device or the host; of padding, anything."""

    sampled_tokens: Tensor  # [B, Q] the accepted path and the choice after it, then 0
    num_accepted: Tensor  # [B, 1] 0..K
    num_verified_nodes: Tensor  # [B, 1] nodes that had a row, which are the first
    tokens: Tensor  # [B, X] of nodes
    parents: Tensor  # [B, X] row of the parent in the slot; [B, 0] where all drafts are chains
    # [B, X] probability by the draft that a live node and all above it hold, verified or not, times
    # CONFIDENCE_ONE, 0 = not live; [B, 0] where nothing learns from it
    probs: Tensor


class StepBuffers:
    """hidden_size: of the target. aux_width: 0: no taps. draft_hidden_size: 0: no draft"""

    def __init__(
        self,
        sizes: EngineSizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        hidden_size: int,
        aux_width: int = 0,
        draft_hidden_size: int = 0,
    ) -> None:
        T, B, W = sizes.max_num_rows, sizes.max_num_seqs, sizes.max_tree_requests
        shape = sizes.widest
        Q, X = shape.path_len, shape.nodes
        P = W * (X + 1)
        self.sizes = sizes
        # in the order of ResultColumns; the planner learns from the probabilities of nodes
        widths = [Q, 1, 1, X, X * shape.is_wide, X * sizes.is_adaptive]

        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        floats = partial(torch.zeros, dtype=dtype, device=device)

        # inputs of the target
        self.idx_mapping = integers(B)  # [B] state row per batch slot, -1 = padding
        self.sample_mapping = integers(B)  # [B] the same where a prompt ends or a round runs
        self.input_ids = integers(T)  # [T] 0 = padding
        self.positions = integers(T)  # [T] 0 = padding
        self.slot_mapping = integers(T)  # [T] cache slot, -1 = padding
        self.num_valid = integers(B)  # [B] rows of a round that are not padding, the first ones
        self.rows_per_slot = integers(B)  # [B] shares of a round whose rows are shared out
        self.verify_start_loc = integers(B + 1)  # [B + 1] first row of each, then the end
        # [B + 1] first row of each part of a prompt, among the rows of prompts; the end for padding
        self.prompt_start_loc = integers(B + 1)
        self.listed_tiles = integers(num_listed_tiles(min(T, SHORT_ROWS), sizes), 3)
        self.sample_states = integers(T)  # [T] by decided row: its state row, -1 = padding
        self.sample_starts = integers(T)  # [T] the same: the first decided row of its slot
        self.last_token_indices = integers(B)  # [B] row to sample after; draft's seed; 0 = padding
        # paths of rows; keys and values of nodes lie after the pool until the accepted ones move
        self.path_rows = integers(P, Q)  # [P, Q] row of the step by depth, -1 after the row's own
        self.path_slots = integers(P, Q)  # [P, Q] the cache slot of each of these
        self.path_starts = integers(W)  # [W] position of the root

        # what the target leaves, and what is decided
        self.hidden_states = floats(T, hidden_size)  # [T, D] after the final norm
        self.aux_hidden_states = floats(T, aux_width)  # [T, E]
        self.target_tokens = integers(T)  # [T] the choices, one per decided row
        self.pq_accepted = integers(B)  # [B] drafts that hold, where p/q decides
        # one tensor, so that one kernel sends a step's results to the host
        self.results = integers(B, sum(widths))  # [B, ...]
        self.columns = ResultColumns(*torch.split(self.results, widths, dim=1))
        self.sampled_tokens = self.columns.sampled_tokens  # [B, Q]
        self.num_accepted = self.columns.num_accepted[:, 0]  # [B]
        self.accepted_rows = integers(W, Q)  # [W, Q] of the accepted path in the slot, then -1
        # [T] rows of the step: Q for each slot, 0 after its accepted path; then those of prompts
        self.path_sources = integers(max(T, W * Q) if W else 0)
        self.moved_from = integers(W * (Q - 1))  # cache slots of accepted nodes, -1 = none
        self.moved_to = integers(W * (Q - 1))  # where they go
        self._add_drafts(draft_hidden_size, dtype, device)

    def _add_drafts(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what the draft alone fills and reads."""
        sizes, shape = self.sizes, self.sizes.widest
        T, B, W = sizes.max_num_rows, sizes.max_num_seqs, sizes.max_tree_requests
        L, X = max(B, W * shape.width), shape.nodes
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.draft_input_ids = integers(T)  # [T] row t embeds token t + 1
        self.draft_sample_slots = integers(T)  # [T] batch slot whose sample it embeds
        # [L, D] hidden states of seeds, then of each level's rows
        self.draft_hidden = torch.zeros(L, hidden_size, dtype=dtype, device=device)
        self.draft_last_tokens = integers(L)  # [L] what the next draft row embeds
        self.draft_positions = integers(L)  # [L] of the seed, then the next row; 0 = padding
        self.draft_slots = integers(L)  # [L] its cache slot, -1 = padding
        self.candidates = Candidates(shape, W, sizes.first_node_slot, device)
        # the rows of blocks, sizes.block_rows for each batch slot, laid out by block_rows.py
        num_rows = B * sizes.block_rows
        self.block_ids = integers(num_rows)  # [B x rows]
        self.block_positions = integers(num_rows)  # [B x rows] 0 = padding
        self.block_slots = integers(num_rows)  # [B x rows] cache slot, -1 = padding
        self.block_limits = integers(num_rows)  # [B x rows] the last key that the row sees
        self.draft_levels = integers(B)  # [B] drafted so far
        # where the draft may stop early; see rounds/level.py
        self.num_going = integers(1)  # [1] slots that draft the next level; 0: all have stopped
        self.votes = integers(1)  # [1] 0 between launches
        # nodes proposed in this step, first a chain of token 0
        self.proposed_tokens = integers(B, X)  # [B, X]
        self.proposed_parents = integers(B, X if W else 0)  # [B, X] as in ResultColumns

    @property
    def features(self) -> Tensor:
        """Return what the draft reads of the target, [T, E or D]: its taps, or hidden_states."""
        has_taps = self.aux_hidden_states.shape[1] > 0
        return self.aux_hidden_states if has_taps else self.hidden_states

    def fill_padding(self, query_lens: Sequence[int]) -> None:
        """Make every row padding, in batch slots of these lengths, to capture graphs."""
        zeros = (self.input_ids, self.positions, self.num_valid, self.last_token_indices)
        of_draft = (self.draft_input_ids, self.draft_last_tokens, self.draft_positions)
        for buffer in (*zeros, *of_draft, self.proposed_tokens, self.path_starts):
            buffer.zero_()
        mappings = (self.idx_mapping, self.sample_mapping, self.slot_mapping, self.sample_states)
        for buffer in (*mappings, self.draft_slots, self.draft_sample_slots):
            buffer.fill_(-1)
        self.path_slots.fill_(self.sizes.first_node_slot)  # which no request owns
        self.candidates.fill_padding()
        for starts in (self.prompt_start_loc, self.verify_start_loc):
            upload(starts, np.cumsum([0, *query_lens]))
        self.listed_tiles.zero_()

    def pad_rows(self, start: int, end: int) -> None:
        """Make rows start..end - 1 padding, for a pass over more rows than the batch slots have."""
        if start < end:
            for buffer in (self.input_ids, self.positions, self.draft_input_ids):
                buffer[start:end].zero_()
            self.slot_mapping[start:end].fill_(-1)
            self.sample_states[start:end].fill_(-1)  # a graph chooses after them too


class Candidates:
    """What the draft's levels leave where nodes may be siblings: candidates, and their rows.

    Until the step ends, keys and values of these rows lie in scratch blocks after the pool, by
    slot. Letters: B batch slots, k rows of a level, M candidates of all levels.

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
