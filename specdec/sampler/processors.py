"""What changes the logits before a token is chosen, in place and in fixed shapes.

In this order: bias and allowed ids, bad words, min_tokens, penalties. Every row sees its own
history, with the drafts before it: the rows of a batch slot follow one another, or those on a row's
path. Padding has state row -1, whose parameters change nothing. Letters: T rows, V columns, P bad
words of L tokens.

The state has the whole vocabulary on every rank; `cut` says which of its ids the logits are of.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.cut_ids import CutIds, columns_of
from specdec.requests.params import SamplingFlags
from specdec.rounds.state import RequestState
from specdec.sizes import MAX_BAD_WORD_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRows:
    """The rows that are decided in a step. The first row of a slot is counted as generated."""

    state_T: Tensor  # state row of every row, -1 = padding
    token_T: Tensor  # of the rows themselves
    position_T: Tensor  # of the rows; the drawn token comes one later
    start_T: Tensor  # the row at which its slot begins
    longest: int  # rows of the longest slot, or path
    # [T, >= 1] of paths: by depth the decided row on each row's path, -1 after it; None: chains
    path_TD: Tensor | None = None


def process(
    logits_TV: Tensor,
    rows: DecidedRows,
    state: RequestState,
    flags: SamplingFlags,
    cut: CutIds | None = None,
) -> None:
    """Apply what the step needs to its logits."""
    if flags.bias:
        logits_TV += _columns(state.sampling.bias, cut)[rows.state_T]
    if flags.bad_words:
        mask_bad_words(logits_TV, rows, state, cut)
    mask_stops(logits_TV, rows, state, cut)
    if flags.penalties:
        penalize(logits_TV, rows, state, cut)


def _columns(table_RV: Tensor, cut: CutIds | None) -> Tensor:
    """View the columns of a table by id that the logits have."""
    return table_RV if cut is None else table_RV[:, cut.ids.start : cut.ids.stop]


def mask_bad_words(
    logits_TV: Tensor, rows: DecidedRows, state: RequestState, cut: CutIds | None = None
) -> None:
    """Forbid the last token of each bad word whose beginning ends what was generated before."""
    sampling = state.sampling
    row_T = rows.state_T
    L = MAX_BAD_WORD_LENGTH
    write_history(rows, state)
    position_TL = rows.position_T[:, None] - torch.arange(L - 2, -1, -1, device=row_T.device)
    is_generated_TL = position_TL >= sampling.num_prompt_tokens[row_T][:, None]
    history_TL = sampling.history[row_T[:, None], position_TL.clamp(min=0)]
    if rows.path_TD is not None:
        history_TL = _on_paths(history_TL, position_TL, rows, rows.path_TD)
    before_TL = torch.where(is_generated_TL, history_TL, -1)
    word_TPL = sampling.bad_words[row_T]
    length_TP = sampling.bad_lengths[row_T]
    is_unused_TPL = torch.arange(L - 1, device=row_T.device) < L - length_TP[..., None]
    is_match_TPL = (word_TPL[..., :-1] == before_TL[:, None]) | is_unused_TPL
    _forbid(logits_TV, word_TPL[..., -1], is_match_TPL.all(dim=-1) & (length_TP > 0), cut)


def write_history(rows: DecidedRows, state: RequestState) -> None:
    """Write the rows' own tokens; of paths the roots' alone, since siblings share a position.

    Padding writes the scratch row, which is never read.
    """
    row_T = rows.state_T
    if rows.path_TD is not None:
        t_T = torch.arange(len(row_T), device=row_T.device)
        row_T = torch.where(rows.start_T == t_T, row_T, -1)
    state.sampling.history[row_T, rows.position_T] = rows.token_T


def _on_paths(
    history_TL: Tensor, position_TL: Tensor, rows: DecidedRows, path_TD: Tensor
) -> Tensor:
    """Overlay the history with the tokens of each row's path, from the root on."""
    depth_TL = position_TL - rows.position_T[rows.start_T][:, None]
    node_TL = path_TD.gather(1, depth_TL.clamp(0, path_TD.shape[1] - 1))
    own_TL = rows.token_T[node_TL.clamp(min=0)]
    return torch.where(depth_TL >= 0, own_TL, history_TL)


def mask_stops(
    logits_TV: Tensor, rows: DecidedRows, state: RequestState, cut: CutIds | None = None
) -> None:
    """Forbid ids that would end the text before a row's own min_position."""
    stop_TP = state.stop_ids[rows.state_T]
    is_early_T1 = (rows.position_T + 1 < state.min_positions[rows.state_T])[:, None]
    _forbid(logits_TV, stop_TP, is_early_T1.expand_as(stop_TP), cut)


def _forbid(
    logits_TV: Tensor, token_TP: Tensor, is_out_TP: Tensor, cut: CutIds | None = None
) -> None:
    column_TP, is_here_TP = columns_of(token_TP, logits_TV, cut)
    # added, since an id may occur several times in a row
    added_TP = torch.where(is_out_TP & is_here_TP, -torch.inf, 0.0)
    logits_TV.scatter_add_(1, column_TP, added_TP)


def penalize(
    logits_TV: Tensor, rows: DecidedRows, state: RequestState, cut: CutIds | None = None
) -> None:
    """Apply the repetition, frequency and presence penalties by the counts at each row."""
    sampling = state.sampling
    row_T = rows.state_T
    count_TV = counts_at_rows(rows, state, cut)
    is_known_TV = _columns(sampling.in_prompt, cut)[row_T] | (count_TV > 0)
    repetition_T1 = sampling.repetition[row_T][:, None]
    weaker_TV = torch.where(logits_TV > 0, logits_TV / repetition_T1, logits_TV * repetition_T1)
    logits_TV.copy_(torch.where(is_known_TV, weaker_TV, logits_TV))
    logits_TV -= sampling.frequency[row_T][:, None] * count_TV
    logits_TV -= sampling.presence[row_T][:, None] * (count_TV > 0)


def counts_at_rows(rows: DecidedRows, state: RequestState, cut: CutIds | None = None) -> Tensor:
    """Count generated tokens [T, V] before each row's own draw, with the drafts before it."""
    count_TV = _columns(state.sampling.output_counts, cut)[rows.state_T]
    column_T, is_here_T = columns_of(rows.token_T, count_TV, cut)
    if rows.path_TD is not None:
        for node_T in rows.path_TD.t()[1:]:  # not the root
            own_T = node_T.clamp(min=0)
            is_node_T1 = ((node_T >= 0) & is_here_T[own_T])[:, None].to(count_TV.dtype)
            count_TV.scatter_add_(1, column_T[own_T][:, None], is_node_T1)
        return count_TV
    t_T = torch.arange(len(count_TV), device=count_TV.device)
    for back in range(rows.longest - 1):
        draft_T = t_T - back  # a draft of the row's own slot, itself included
        own_T = draft_T.clamp(min=0)
        is_own_T1 = ((draft_T > rows.start_T) & is_here_T[own_T])[:, None].to(count_TV.dtype)
        count_TV.scatter_add_(1, column_T[own_T][:, None], is_own_T1)
    return count_TV
