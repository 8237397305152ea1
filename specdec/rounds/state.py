"""What a request carries from step to step: its state row on the device. Rows are never reordered.

Every tensor has one scratch row at the end, so that row -1 (padding) may be read and written.
Letters: R state rows, K nodes of the longest path, X nodes of the widest draft, M blocks per
request, P stop ids, W draft vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from specdec.requests.params import SamplingStart
from specdec.sizes import BLOCK_SIZE, MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_STOP_IDS, DraftShape


class RequestState:
    """The persistent rows of all requests.

    shape: the widest draft, whose paths are the longest; else a chain
    draft_vocab_size: width of draft_scores, which p/q acceptance reads; 0: they are not kept
    has_probs: whether nodes have probabilities
    """

    def __init__(
        self,
        num_rows: int,
        shape: DraftShape,
        blocks_per_request: int,
        scratch_block: int,
        device: torch.device,
        *,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        has_probs: bool = False,
    ) -> None:
        R, X = num_rows + 1, shape.nodes  # here with the scratch row

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self.last_sampled_tokens = zeros(R)  # [R + 1] not yet computed: first row of the next step
        self.num_computed_tokens = zeros(R)  # [R + 1] have target KV; the last sampled's position
        # what was proposed for the positions after it: nodes, parents before their children
        self.draft_tokens = zeros(R, X)  # [R + 1, X]
        # [R + 1, X] row of the parent, 0 = the root; a chain's are implied, and neither written nor
        # read: the row before
        self.draft_parents = zeros(R, X)
        # [R + 1, X] probability that a node and all above it hold
        self.draft_probs = torch.zeros(R, X if has_probs else 0, device=device)
        # [R + 1] live nodes, the first ones: proposed since the last commit, no deeper than the
        # request's own K, and within the context
        self.num_nodes = zeros(R)
        self.num_draft_tokens = zeros(R)  # [R + 1] the request's own K: levels, at most K
        self.block_table = zeros(R, blocks_per_request)  # [R + 1, M] cache blocks by position
        self.block_table.fill_(scratch_block)
        self.min_positions = zeros(R)  # [R + 1] see kernels/best_token.py
        self.stop_ids = zeros(R, MAX_STOP_IDS)  # [R + 1, P] padded by repeating the first
        self.sampling = SamplingRows(num_rows, vocab_size, blocks_per_request * BLOCK_SIZE, device)
        # [R + 1, K, W] logits / temperature that the drafts were drawn from, -inf = out
        self.draft_scores = torch.zeros(R, shape.path_len - 1, draft_vocab_size, device=device)
        self.scratch_block = scratch_block  # of places without a block

    def slots(self, positions: Tensor, rows: Tensor, is_valid: Tensor) -> Tensor:
        """Cache slots of positions of state rows, any shape; -1 where `is_valid` is false."""
        block = self.block_table[rows, torch.where(is_valid, positions // BLOCK_SIZE, 0)]
        return torch.where(is_valid, block * BLOCK_SIZE + positions % BLOCK_SIZE, -1)


class SamplingRows:
    """How tokens are chosen for each request: the sampling part of the state rows.

    The requests' flags decide which tensors are read at all. num_rows: without the last, the greedy
    scratch row. Letters: V vocabulary, P bad words of at most L tokens, N positions.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, max_positions: int, device: torch.device
    ) -> None:
        R, V = num_rows + 1, vocab_size
        P, L = MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH
        self.vocab_size = V

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.floats = zeros(R, 6, dtype=torch.float32)  # [R + 1, 6] the six below
        self.temperature, self.log_min_p, self.top_p = self.floats[:, :3].unbind(1)
        self.presence, self.frequency, self.repetition = self.floats[:, 3:].unbind(1)
        self.floats.copy_(torch.tensor(self.floats_of(SamplingStart())))
        self.integers = zeros(R, 4)  # [R + 1, 4] the four below
        self.seeds = self.integers[:, :2]
        self.top_k = self.integers[:, 2]
        self.num_prompt_tokens = self.integers[:, 3]
        self.bias = zeros(R, V, dtype=torch.float32)  # [R + 1, V] -inf = not allowed
        self.in_prompt = zeros(R, V, dtype=torch.bool)  # [R + 1, V]
        self.output_counts = zeros(R, V, dtype=torch.int32)  # [R + 1, V] of generated tokens
        self.bad_words = zeros(R, P, L)  # [R + 1, P, L] each ends in the last column
        self.bad_lengths = zeros(R, P)  # [R + 1, P] 0 = none
        self.history = zeros(R, max_positions)  # [R + 1, N] generated tokens by position
        # the rows whose bias, counts or bad words are in use
        self.in_use: dict[str, set[int]] = {"bias": set(), "counts": set(), "bad words": set()}

    @staticmethod
    def floats_of(start: SamplingStart) -> list[float]:
        log_min_p = float(np.log(start.min_p)) if start.min_p > 0 else -np.inf
        penalties = [start.presence_penalty, start.frequency_penalty, start.repetition_penalty]
        return [start.temperature, log_min_p, start.top_p, *penalties]

    @staticmethod
    def integers_of(start: SamplingStart) -> list[int]:
        return [start.seed & 0xFFFFFFFF, start.seed >> 32, start.top_k, len(start.prompt)]
