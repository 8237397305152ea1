"""Static buffers of the current step, allocated once: filled from the state, used by the graphs.

Letters: T rows of the largest step, B batch slots, Q = K + 1, D hidden size, E width of the aux
hidden states. What trees need beside it is in tree_buffers.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdec.rounds.tree_buffers import TreeBuffers
from specdec.rounds.upload import upload
from specdec.sizes import TreeShape

CONFIDENCE_ONE = 1 << 24  # of a probability as an integer; that of a live draft is at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """What decides the shapes of all buffers."""

    max_tokens: int
    max_reqs: int
    num_speculative_tokens: int
    hidden_size: int
    aux_width: int  # 0: no taps
    draft_hidden_size: int  # 0: no draft
    keeps_probs: bool = False  # rows are shared out among drafts by their probabilities
    tree: TreeShape | None = None  # of what is drafted; None: chains
    num_kv_blocks: int = 0  # with trees: blocks before those of their nodes
    max_tree_reqs: int = 0  # with trees: batch slots that may have one

    @property
    def max_level_rows(self) -> int:
        """Count the rows of the draft's own levels: one for each request, top_k for each tree."""
        of_trees = 0 if self.tree is None else self.max_tree_reqs * self.tree.top_k
        return max(self.max_reqs, of_trees)

    @property
    def results_width(self) -> int:
        """Count the columns of the results; see results.py."""
        K = self.num_speculative_tokens
        of_chains = K + 1 + self.keeps_probs * K
        of_trees = 0 if self.tree is None else 1 + 3 * self.tree.num_nodes
        return K + 2 + max(of_chains, of_trees)


class StepBuffers:
    def __init__(self, sizes: BufferSizes, dtype: torch.dtype, device: torch.device) -> None:
        T = sizes.max_tokens
        B = sizes.max_reqs
        K = sizes.num_speculative_tokens
        L = sizes.max_level_rows
        self.sizes = sizes

        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        floats = partial(torch.zeros, dtype=dtype, device=device)

        # inputs of the target
        self.idx_mapping = integers(B)  # [B] state row per batch slot, -1 = padding
        self.sample_mapping = integers(B)  # [B] the same where a prompt ends or a round runs
        self.input_ids = integers(T)  # [T] 0 = padding
        self.positions = integers(T)  # [T] 0 = padding
        self.slot_mapping = integers(T)  # [T] cache slot, -1 = padding
        self.num_valid = integers(B)  # [B] rows of a round that are not padding, 0..Q
        self.rows_per_slot = integers(B)  # [B] shares of a round whose rows are shared out
        self.verify_start_loc = integers(B + 1)  # [B + 1] and the first row of each; then the end
        # [B + 1] first row of each part of a prompt, among the rows of prompts; the end for padding
        self.prompt_start_loc = integers(B + 1)
        self.sample_states = integers(T)  # [T] by decided row: its state row, -1 = padding
        self.sample_starts = integers(T)  # [T] the same: the first decided row of its slot
        self.last_token_indices = integers(B)  # [B] row to sample after; draft's seed; 0 = padding

        # what the target leaves
        self.hidden_states = floats(T, sizes.hidden_size)  # [T, D] after the final norm
        self.aux_hidden_states = floats(T, sizes.aux_width)  # [T, E]
        self.target_tokens = integers(T)  # [T] the choices, one per decided row
        self.pq_accepted = integers(B)  # [B] drafts that hold, where p/q decides
        # one tensor, so that one kernel sends a step's results to the host
        self.results = integers(B, sizes.results_width)  # [B, ...]
        self.sampled_tokens = self.results[:, : K + 1]  # [B, Q] valid up to num_accepted
        self.num_accepted = self.results[:, K + 1]  # [B] 0..K
        # of rounds that verify chains, or nothing; of others see tree_buffers.py
        self.verified_tokens = self.results[:, K + 2 : 2 * K + 2]  # [B, K] drafts of a round
        self.num_verified = self.results[:, 2 * K + 2]  # [B] those that had a row, 0..K
        # [B, K] or [B, 0], of all live drafts, verified or not, times CONFIDENCE_ONE; others: 0
        self.confidences = self.results[:, 2 * K + 3 :][:, : K if sizes.keeps_probs else 0]

        # the draft's own
        self.draft_input_ids = integers(T)  # [T] row t embeds token t + 1
        self.draft_sample_slots = integers(T)  # [T] batch slot whose sample it embeds
        # [B, D] streams of seeds, then what is recycled; of trees [B x k], as parents of an older
        # level may still be named
        self.draft_hidden = floats(L, sizes.draft_hidden_size)
        # of the next level's rows: of chains [B], of trees [B x k]
        self.draft_last_tokens = integers(L)  # [B] what the next draft row embeds
        self.draft_positions = integers(L)  # [B] of the seed, then the next row; 0 = padding
        self.draft_slots = integers(L)  # [B] its cache slot, -1 = padding
        self.draft_tokens = integers(B, K)  # [B, K] chains proposed in this step; 0 = padding
        self.draft_levels = integers(B)  # [B] drafted so far
        # where the draft may stop early; see rounds/stop.py
        self.num_going = integers(1)  # [1] slots that draft the next level; 0: all have stopped
        self.votes = integers(1)  # [1] 0 between launches
        self.tree: TreeBuffers | None = None
        if sizes.tree is not None:
            most, first_block = sizes.max_tree_reqs, sizes.num_kv_blocks
            self.tree = TreeBuffers(sizes.tree, most, T, first_block, self.results[:, K + 2 :])

    @property
    def of_trees(self) -> TreeBuffers:
        assert self.tree is not None, "buffers of an engine that drafts chains"
        return self.tree

    @property
    def features(self) -> Tensor:
        """Return what the draft reads of the target, [T, E or D]: its taps, or hidden_states."""
        has_taps = self.sizes.aux_width > 0
        return self.aux_hidden_states if has_taps else self.hidden_states

    def fill_padding(self, query_lens: Sequence[int]) -> None:
        """Make every row padding, in batch slots of these lengths, to capture graphs."""
        zeros = (self.input_ids, self.positions, self.num_valid, self.last_token_indices)
        of_draft = (self.draft_input_ids, self.draft_last_tokens, self.draft_positions)
        for buffer in (*zeros, *of_draft, self.draft_tokens):
            buffer.zero_()
        mappings = (self.idx_mapping, self.sample_mapping, self.slot_mapping, self.sample_states)
        for buffer in (*mappings, self.draft_slots, self.draft_sample_slots):
            buffer.fill_(-1)
        if self.tree is not None:
            self.tree.fill_padding()
        for starts in (self.prompt_start_loc, self.verify_start_loc):
            upload(starts, np.cumsum([0, *query_lens]))

    def pad_rows(self, start: int, end: int) -> None:
        """Make rows start..end - 1 padding, for a pass over more rows than the batch slots have."""
        if start < end:
            for buffer in (self.input_ids, self.positions, self.draft_input_ids):
                buffer[start:end].zero_()
            self.slot_mapping[start:end].fill_(-1)
