"""Decided rows for tests: as many for each slot, or only those that are no padding."""

import torch
from torch import Tensor

from specdec.sampler.processors import DecidedRows


def uniform_rows(
    row_B: Tensor, token_BQ: Tensor, position_BQ: Tensor, num_valid_B: Tensor
) -> DecidedRows:
    """Q rows for each slot, of which the first num_valid are no padding."""
    B, Q = token_BQ.shape
    i_Q = torch.arange(Q, device=row_B.device)
    state_BQ = torch.where(i_Q < num_valid_B[:, None], row_B[:, None], -1)
    return DecidedRows(
        state_T=state_BQ.flatten(),
        token_T=token_BQ.flatten(),
        position_T=position_BQ.flatten(),
        start_T=torch.arange(0, B * Q, Q, device=row_B.device).repeat_interleave(Q),
        longest=Q,
    )


def without_padding(rows: DecidedRows) -> tuple[DecidedRows, Tensor]:
    """Slots of different lengths, and which rows they are."""
    kept_T = (rows.state_T >= 0).nonzero()[:, 0]
    new_T = torch.cumsum(rows.state_T >= 0, dim=0) - 1
    kept = (rows.state_T, rows.token_T, rows.position_T)
    state_T, token_T, position_T = (each[kept_T] for each in kept)
    ragged = DecidedRows(
        state_T=state_T,
        token_T=token_T,
        position_T=position_T,
        start_T=new_T[rows.start_T[kept_T]],
        longest=rows.longest,
    )
    return ragged, kept_T
