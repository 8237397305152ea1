"""What a request carries from step to step: its state row on the device. Rows are never reordered.

Every tensor has one scratch row at the end, so that row -1 (padding) may be read and written.
Letters: R state rows, K draft tokens, X nodes of the widest draft, M blocks per request.
"""

import torch
from torch import Tensor

from specdec.rounds.sampling_rows import SamplingRows
from specdec.sizes import BLOCK_SIZE, MAX_STOP_IDS


class RequestState:
    """The persistent rows of all requests.

    num_draft_tokens: K, on the longest path. num_nodes: X, where it is more than K.
    draft_vocab_size: where the draft's probabilities are kept for p/q acceptance, else 0.
    has_probs: whether nodes have probabilities. may_stop: whether fewer may be live than a request
    verifies at most
    """

    def __init__(
        self,
        num_rows: int,
        num_draft_tokens: int,
        blocks_per_request: int,
        scratch_block: int,
        device: torch.device,
        *,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        has_probs: bool = False,
        may_stop: bool = False,
        num_nodes: int = 0,
    ) -> None:
        R = num_rows + 1
        num_nodes = max(num_nodes, num_draft_tokens)
        self.may_stop = may_stop

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.last_sampled_tokens = zeros(R)  # [R + 1] not yet computed: first row of the next step
        self.num_computed_tokens = zeros(R)  # [R + 1] have target KV; the last sampled's position
        # what was proposed for the positions after it: nodes, parents before their children
        self.draft_tokens = zeros(R, num_nodes)  # [R + 1, X]
        self.draft_parents = zeros(R, num_nodes)  # [R + 1, X] row of the parent, 0 = the root
        self.draft_depths = zeros(R, num_nodes)  # [R + 1, X] 1 for a child of the root
        self.num_draft_tokens = zeros(R)  # [R + 1] the request's own K, at most K
        self.num_nodes = zeros(R)  # [R + 1] proposed since the last commit
        # [R + 1, X] that a draft and all before it hold
        self.draft_probs = torch.zeros(R, num_nodes if has_probs else 0, device=device)
        self.block_table = zeros(R, blocks_per_request)  # [R + 1, M] cache blocks by position
        self.block_table.fill_(scratch_block)
        self.min_positions = zeros(R)  # [R + 1] see kernels/best_token.py
        self.stop_ids = zeros(R, MAX_STOP_IDS)  # [R + 1, P] padded by repeating the first
        self.sampling = SamplingRows(num_rows, vocab_size, blocks_per_request * BLOCK_SIZE, device)
        # [R + 1, K, W] logits / temperature that the drafts were drawn from, -inf = out
        self.draft_scores = torch.zeros(R, num_draft_tokens, draft_vocab_size, device=device)
        self.scratch_block = scratch_block  # of places without a block

    def slots(self, positions: Tensor, rows: Tensor, is_valid: Tensor) -> Tensor:
        """Cache slots of positions of state rows, any shape; -1 where `is_valid` is false."""
        block = self.block_table[rows, torch.where(is_valid, positions // BLOCK_SIZE, 0)]
        return torch.where(is_valid, block * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
