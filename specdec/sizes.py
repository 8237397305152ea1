"""The sizes of an engine, resolved once, and the limits that host and device share."""

from dataclasses import dataclass

BLOCK_SIZE = 64  # tokens per cache block: one attention tile
MOST_SHARED_ROWS = 512  # beyond, each row of a round costs more than a draft is worth
MAX_STOP_IDS = 64  # ids that min_tokens can mask, per request
MAX_BAD_WORDS = 64  # token sequences, per request
MAX_BAD_WORD_LENGTH = 16  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """All in tokens, requests or blocks."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    num_speculative_tokens: int  # K; 0 with or without a draft is plain decoding
    is_adaptive: bool = False  # rows of a round are shared out, and levels chosen, by what pays

    @property
    def query_len(self) -> int:
        """Rows per request of a round, Q = K + 1."""
        return self.num_speculative_tokens + 1

    @property
    def num_state_rows(self) -> int:
        """Some more than requests run: a row is free only once no step in flight can write it."""
        return self.max_num_seqs + self.max_num_seqs // 8 + 1

    @property
    def max_verify_rows(self) -> int:
        """Rows of the largest round."""
        most = self.max_num_seqs * self.query_len
        return min(most, max(MOST_SHARED_ROWS, 2 * self.max_num_seqs)) if self.is_adaptive else most

    @property
    def max_num_rows(self) -> int:
        """Rows of the largest step: all requests verify, and prompts ride along."""
        return self.max_verify_rows + self.max_num_batched_tokens

    @property
    def blocks_per_request(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // BLOCK_SIZE)
