"""The rows of a round: for each request its last sampled token and its drafts, at the positions behind its context.

Row i of batch slot b stands at position num_computed + i. It is padding (token 0, position 0, slot -1) where the slot
is padding, where i exceeds the request's own number of drafts, and at positions >= max_model_len.
"""

import torch

from specdec.buffers import StepBuffers
from specdec.kernels.slot_mapping import slot_mapping_ref
from specdec.kv_cache import BLOCK_SIZE
from specdec.state import RequestState


def fill_round(buffers: StepBuffers, state: RequestState, num_reqs: int, max_model_len: int) -> None:
    """Gather the inputs of `num_reqs` batch slots (padding included) from the state by buffers.idx_mapping."""
    fill_round_ref(buffers, state, num_reqs, max_model_len)


def fill_round_ref(buffers: StepBuffers, state: RequestState, num_reqs: int, max_model_len: int) -> None:
    row_B = buffers.idx_mapping[:num_reqs]
    Q = buffers.sampled_tokens.shape[1]
    T = num_reqs * Q
    row_BQ = row_B[:, None].expand(num_reqs, Q)
    i_BQ = torch.arange(Q, device=row_B.device).expand(num_reqs, Q)
    position_BQ = state.num_computed_tokens[row_BQ] + i_BQ
    is_valid_BQ = (row_BQ >= 0) & (i_BQ <= state.num_draft_tokens[row_BQ]) & (position_BQ < max_model_len)
    ids_BQ = torch.cat([state.last_sampled_tokens[row_B][:, None], state.draft_tokens[row_B]], dim=1)

    buffers.input_ids[:T] = torch.where(is_valid_BQ, ids_BQ, 0).view(T)
    buffers.positions[:T] = torch.where(is_valid_BQ, position_BQ, 0).view(T)
    slots_BQ = slot_mapping_ref(position_BQ, row_BQ, state.block_table, BLOCK_SIZE, is_valid_BQ)
    buffers.slot_mapping[:T] = slots_BQ.view(T)
    buffers.num_valid[:num_reqs] = is_valid_BQ.sum(dim=1)
    buffers.query_start_loc[: num_reqs + 1] = torch.arange(0, T + Q, Q, device=row_B.device)
    buffers.sample_mapping[:num_reqs] = row_B
