"""How tokens are chosen for each request, on the device, in the same state rows as state.py's.

The requests' flags decide which tensors are read at all (sampling_flags.py). Letters: R state rows,
V vocabulary, P bad words of at most L tokens, N positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.requests.row_start import SamplingStart
from specdec.rounds.upload import upload
from specdec.sizes import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS


class SamplingRows:
    """The sampling part of the state rows. num_rows: without the last, the greedy scratch row."""

    def __init__(
        self, num_rows: int, vocab_size: int, max_positions: int, device: torch.device
    ) -> None:
        R = num_rows + 1
        V = vocab_size
        P = MAX_BAD_WORDS
        L = MAX_BAD_WORD_LENGTH
        self.vocab_size = V

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.floats = zeros(R, 6, dtype=torch.float32)  # [R + 1, 6] the six below
        self.temperature, self.log_min_p, self.top_p = self.floats[:, :3].unbind(1)
        self.presence, self.frequency, self.repetition = self.floats[:, 3:].unbind(1)
        self.floats.copy_(torch.tensor(self.floats_of(SamplingStart())))
        self.integers = zeros(R, 4)  # [R + 1, 4] the three below
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
        self._in_use: dict[str, set[int]] = {"bias": set(), "counts": set(), "bad words": set()}

    @staticmethod
    def floats_of(start: SamplingStart) -> list[float]:
        log_min_p = float(np.log(start.min_p)) if start.min_p > 0 else -np.inf
        penalties = [start.presence_penalty, start.frequency_penalty, start.repetition_penalty]
        return [start.temperature, log_min_p, start.top_p, *penalties]

    @staticmethod
    def integers_of(start: SamplingStart) -> list[int]:
        return [start.seed & 0xFFFFFFFF, start.seed >> 32, start.top_k, len(start.prompt)]

    def assign_large(self, row: int, start: SamplingStart, generated: Sequence[int] = ()) -> None:
        """Start a request in a row, except for its floats and integers (start.py).

        Only what this request or the one before it in the row uses is written. generated: after a
        preemption its tokens but the last, which the end of prefill counts.
        """
        has_bias = bool(start.logit_bias) or start.allowed_token_ids is not None
        if _is_written(row, has_bias, self._in_use["bias"]):
            upload(self.bias[row], _bias(start, self.vocab_size))
        if _is_written(row, start.has_penalties, self._in_use["counts"]):
            in_prompt = np.zeros(self.vocab_size, np.bool_)
            in_prompt[list(start.prompt)] = True
            upload(self.in_prompt[row], in_prompt)
            counts = np.bincount(np.array(generated, np.int64), minlength=self.vocab_size)
            upload(self.output_counts[row], counts.astype(np.int32))
        if _is_written(row, bool(start.bad_words), self._in_use["bad words"]):
            words, lengths = _bad_words(start)
            upload(self.bad_words[row], words)
            upload(self.bad_lengths[row], lengths)
            upload(self.history[row, len(start.prompt) :], np.array(generated, np.int64))


def _is_written(row: int, is_used: bool, rows_in_use: set[int]) -> bool:
    """Whether a row has to be written: it is used now, or holds what another request left."""
    was_used = row in rows_in_use
    rows_in_use.add(row) if is_used else rows_in_use.discard(row)
    return is_used or was_used


def _bias(start: SamplingStart, vocab_size: int) -> np.ndarray:
    bias = np.zeros(vocab_size, np.float32)
    if start.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(start.allowed_token_ids)] = 0
    for token, value in start.logit_bias.items():
        bias[token] += value
    return bias


def _bad_words(start: SamplingStart) -> tuple[np.ndarray, np.ndarray]:
    words = np.zeros((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), np.int64)
    lengths = np.zeros(MAX_BAD_WORDS, np.int64)
    for i, word in enumerate(start.bad_words):
        words[i, MAX_BAD_WORD_LENGTH - len(word) :] = word
        lengths[i] = len(word)
    return words, lengths
