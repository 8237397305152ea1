"""What changes the logits before a token is chosen, in place and in fixed shapes.

In this order: bias and allowed ids, bad words, min_tokens, penalties. Every row sees its own
history, with the drafts before it. Rows come in consecutive runs of Q, one run per batch slot:
Q = K + 1 in a round, 1 after a chunk. Padding has state row -1, whose parameters change nothing.
Letters: T = B x Q rows, V vocabulary, P bad words of L tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.requests.sampling_flags import SamplingFlags
from specdec.sizes import MAX_BAD_WORD_LENGTH
from specdec.stepping.state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRows:
    """The rows that are decided in a step."""

    row_B: Tensor  # state row per batch slot, -1 = padding
    token_BQ: Tensor  # of the rows themselves; column 0 is already counted as generated
    position_BQ: Tensor  # of the rows; the drawn token comes one later
    num_valid_B: Tensor  # rows of each slot that are not padding, 0..Q

    @property
    def is_valid_BQ(self) -> Tensor:
        """Which rows are not padding."""
        i_Q = torch.arange(self.token_BQ.shape[1], device=self.row_B.device)
        return i_Q < self.num_valid_B[:, None]

    @property
    def row_T(self) -> Tensor:
        """State row of every row, -1 = padding."""
        return torch.where(self.is_valid_BQ, self.row_B[:, None], -1).flatten()

    @property
    def position_T(self) -> Tensor:
        """Position of every row."""
        return self.position_BQ.flatten()


def process(
    logits_TV: Tensor, rows: DecidedRows, state: RequestState, flags: SamplingFlags
) -> None:
    """Apply what the step needs to its logits."""
    sampling = state.sampling
    if flags.bias:
        logits_TV += sampling.bias[rows.row_T]
    if flags.bad_words:
        mask_bad_words(logits_TV, rows, state)
    mask_stops(logits_TV, rows, state)
    if flags.penalties:
        penalize(logits_TV, rows, state)


def mask_bad_words(logits_TV: Tensor, rows: DecidedRows, state: RequestState) -> None:
    """No row completes a bad word whose beginning is the end of what was generated before."""
    sampling = state.sampling
    row_T = rows.row_T
    L = MAX_BAD_WORD_LENGTH
    # padding writes the scratch row, which is never read
    scratch = torch.where(rows.is_valid_BQ, rows.row_B[:, None], -1)
    sampling.history[scratch, rows.position_BQ] = rows.token_BQ
    position_TL = rows.position_T[:, None] - torch.arange(L - 2, -1, -1, device=row_T.device)
    is_generated_TL = position_TL >= sampling.num_prompt_tokens[row_T][:, None]
    history_TL = sampling.history[row_T[:, None], position_TL.clamp(min=0)]
    before_TL = torch.where(is_generated_TL, history_TL, -1)
    word_TPL = sampling.bad_words[row_T]
    length_TP = sampling.bad_lengths[row_T]
    is_unused_TPL = torch.arange(L - 1, device=row_T.device) < L - length_TP[..., None]
    is_match_TPL = (word_TPL[..., :-1] == before_TL[:, None]) | is_unused_TPL
    _forbid(logits_TV, word_TPL[..., -1], is_match_TPL.all(dim=-1) & (length_TP > 0))


def mask_stops(logits_TV: Tensor, rows: DecidedRows, state: RequestState) -> None:
    """Before a row's own min_position, no id that would end the text."""
    stop_TP = state.stop_ids[rows.row_T]
    is_early_T1 = (rows.position_T + 1 < state.min_positions[rows.row_T])[:, None]
    _forbid(logits_TV, stop_TP, is_early_T1.expand_as(stop_TP))


def _forbid(logits_TV: Tensor, token_TP: Tensor, is_out_TP: Tensor) -> None:
    # added, since an id may occur several times in a row
    logits_TV.scatter_add_(1, token_TP, torch.where(is_out_TP, -torch.inf, 0.0))


def penalize(logits_TV: Tensor, rows: DecidedRows, state: RequestState) -> None:
    """Repetition, frequency, presence penalty, over the counts at each row."""
    sampling = state.sampling
    row_T = rows.row_T
    count_TV = counts_at_rows(rows, state)
    is_known_TV = sampling.in_prompt[row_T] | (count_TV > 0)
    repetition_T1 = sampling.repetition[row_T][:, None]
    weaker_TV = torch.where(logits_TV > 0, logits_TV / repetition_T1, logits_TV * repetition_T1)
    logits_TV.copy_(torch.where(is_known_TV, weaker_TV, logits_TV))
    logits_TV -= sampling.frequency[row_T][:, None] * count_TV
    logits_TV -= sampling.presence[row_T][:, None] * (count_TV > 0)


def counts_at_rows(rows: DecidedRows, state: RequestState) -> Tensor:
    """[T, V] generated tokens before each row's own draw, with the drafts before it."""
    B, Q = rows.token_BQ.shape
    count_BQV = state.sampling.output_counts[rows.row_B][:, None].repeat(1, Q, 1)
    for i in range(1, Q):
        token_BI1 = rows.token_BQ[:, i, None, None].expand(B, Q - i, 1)
        count_BQV[:, i:].scatter_add_(2, token_BI1, torch.ones_like(count_BQV[:, i:, :1]))
    return count_BQV.flatten(0, 1)
