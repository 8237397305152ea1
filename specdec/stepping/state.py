"""What a request carries from one step to the next, one row per request on the device. Rows are never reordered.

Every tensor has one scratch row behind the last, so that row -1 (padding) is a row that may be read and written.
Letters: R request rows, K draft tokens, M blocks per request.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.requests.row_start import RowStart
from specdec.sizes import BLOCK_SIZE, MAX_STOP_IDS
from specdec.stepping.sampling_rows import SamplingRows
from specdec.stepping.upload import upload, uploaded


class RequestState:
    """draft_vocab_size: where the draft's probabilities are kept for p/q acceptance, else 0."""

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
    ) -> None:
        R = num_rows + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.last_sampled_tokens = zeros(
            R
        )  # [R + 1] sampled, not yet computed: the first row of the next verify
        self.num_computed_tokens = zeros(
            R
        )  # [R + 1] tokens with target KV = position of last_sampled_tokens
        self.draft_tokens = zeros(
            R, num_draft_tokens
        )  # [R + 1, K] proposed for the positions behind it
        self.num_draft_tokens = zeros(R)  # [R + 1] the request's own K, at most K
        self.block_table = zeros(R, blocks_per_request)  # [R + 1, M] cache blocks by position
        self.block_table.fill_(scratch_block)
        self.min_positions = zeros(R)  # [R + 1] see kernels/best_token.py
        self.stop_ids = zeros(R, MAX_STOP_IDS)  # [R + 1, P] padded by repeating the first
        self.sampling = SamplingRows(num_rows, vocab_size, blocks_per_request * BLOCK_SIZE, device)
        scores = torch.zeros(R, num_draft_tokens, draft_vocab_size, device=device)
        self.draft_scores = (
            scores  # [R + 1, K, W] logits / temperature that the drafts were drawn from, -inf = out
        )
        self._scratch_block = scratch_block

    def assign(self, row: int, start: RowStart) -> None:
        """Start a request in a row, behind all that was launched before."""
        blocks = np.full(self.block_table.shape[1], self._scratch_block)
        blocks[: len(start.blocks)] = start.blocks
        ids = np.full(MAX_STOP_IDS, start.stop_ids[0] if start.stop_ids else 0)
        ids[: len(start.stop_ids)] = start.stop_ids
        upload(self.block_table[row], blocks)
        upload(self.stop_ids[row], ids)
        self.num_draft_tokens[row].fill_(start.num_draft_tokens)
        self.min_positions[row].fill_(start.min_position if start.stop_ids else 0)
        self.num_computed_tokens[row].zero_()
        self.sampling.assign(row, start.sampling, start.generated)

    def grow(self, grown: Sequence[tuple[int, int, int]]) -> None:
        """Give requests further blocks: (row, place in the block table, cache block) each."""
        device = self.block_table.device
        row_X, place_X, block_X = uploaded(np.array(grown, np.int64).reshape(-1, 3).T, device)
        self.block_table[row_X, place_X] = block_X
