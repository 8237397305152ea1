"""The rows of a round: for each request its last sampled token and its drafts, at the positions behind its context.

There are Q = K + 1 of them, or 1 in a round in which nobody drafts. Row i of batch slot b stands at position
num_computed + i. It is padding (token 0, position 0, slot -1) where the slot is padding, where i exceeds the request's
own number of drafts, and at positions >= max_model_len.
"""

import torch

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.kernels.slot_mapping import slot_mapping_ref
from specdec.sizes import BLOCK_SIZE
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState


def fill_round(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    max_model_len: int,
    query_len: int | None = None,
) -> None:
    """Gather the inputs of `num_reqs` batch slots (padding included) from the state by buffers.idx_mapping.

    query_len: rows of each, None for K + 1.
    """
    Q = query_len or buffers.sampled_tokens.shape[1]
    if use_triton(buffers.idx_mapping):
        launch_fill_round(buffers, state, num_reqs, max_model_len, Q)
    else:
        fill_round_ref(buffers, state, num_reqs, max_model_len, Q)


def launch_fill_round(
    buffers: StepBuffers, state: RequestState, num_reqs: int, max_model_len: int, Q: int
) -> None:
    _fill_round_kernel[(num_reqs,)](
        buffers.input_ids,
        buffers.positions,
        buffers.slot_mapping,
        buffers.num_valid,
        buffers.query_start_loc,
        buffers.sample_mapping,
        buffers.idx_mapping,
        state.last_sampled_tokens,
        state.draft_tokens,
        state.num_computed_tokens,
        state.num_draft_tokens,
        state.block_table,
        state.block_table.shape[0] - 1,
        state.block_table.shape[1],
        max_model_len,
        state.draft_tokens.shape[1],
        Q=Q,
        Q_PADDED=next_power_of_2(Q),
        S=BLOCK_SIZE,
        num_warps=1,
        **launch_options(buffers.idx_mapping),
    )


@jit
def _fill_round_kernel(
    input_ids_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    num_valid_ptr,  # [B]
    starts_ptr,  # [B + 1]
    sample_ptr,  # [B]
    idx_ptr,  # [B]
    last_sampled_ptr,  # [R + 1]
    drafts_ptr,  # [R + 1, K]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1]
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    max_model_len,
    K,
    Q: tl.constexpr,
    Q_PADDED: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    wait_for_inputs(PDL)
    b = tl.program_id(0)
    idx = tl.load(idx_ptr + b)
    row = tl.where(idx < 0, R, idx)
    i = tl.arange(0, Q_PADDED)
    position = tl.load(num_computed_ptr + row) + i
    last = tl.where(idx < 0, -1, tl.minimum(tl.load(num_drafts_ptr + row), Q - 1))
    is_valid = (i <= last) & (position < max_model_len)
    draft = tl.load(drafts_ptr + row * K + i - 1, mask=(i > 0) & is_valid, other=0)
    token = tl.where(i == 0, tl.load(last_sampled_ptr + row), draft)
    block = tl.load(block_table_ptr + row * M + position // S, mask=is_valid, other=0)
    at, inside = b * Q + i, i < Q
    tl.store(input_ids_ptr + at, tl.where(is_valid, token, 0), mask=inside)
    tl.store(positions_ptr + at, tl.where(is_valid, position, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(is_valid, block * S + position % S, -1), mask=inside)
    tl.store(num_valid_ptr + b, tl.sum(is_valid.to(tl.int64), axis=0))
    tl.store(sample_ptr + b, idx)
    tl.store(starts_ptr + b + 1, (b + 1) * Q)
    if b == 0:
        tl.store(starts_ptr, 0)


def fill_round_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, max_model_len: int, Q: int
) -> None:
    row_B = buffers.idx_mapping[:num_reqs]
    T = num_reqs * Q
    row_BQ = row_B[:, None].expand(num_reqs, Q)
    i_BQ = torch.arange(Q, device=row_B.device).expand(num_reqs, Q)
    position_BQ = state.num_computed_tokens[row_BQ] + i_BQ
    is_valid_BQ = (
        (row_BQ >= 0) & (i_BQ <= state.num_draft_tokens[row_BQ]) & (position_BQ < max_model_len)
    )
    ids_BQ = torch.cat(
        [state.last_sampled_tokens[row_B][:, None], state.draft_tokens[row_B]], dim=1
    )[:, :Q]

    buffers.input_ids[:T] = torch.where(is_valid_BQ, ids_BQ, 0).view(T)
    buffers.positions[:T] = torch.where(is_valid_BQ, position_BQ, 0).view(T)
    slots_BQ = slot_mapping_ref(position_BQ, row_BQ, state.block_table, BLOCK_SIZE, is_valid_BQ)
    buffers.slot_mapping[:T] = slots_BQ.view(T)
    buffers.num_valid[:num_reqs] = is_valid_BQ.sum(dim=1)
    buffers.query_start_loc[: num_reqs + 1] = torch.arange(0, T + Q, Q, device=row_B.device)
    buffers.sample_mapping[:num_reqs] = row_B
