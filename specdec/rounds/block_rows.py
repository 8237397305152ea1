"""The rows of blocks: what a parallel draft runs in one pass to propose the drafts of a round.

A request whose last sampled token x_n, the anchor, is at position n has rows [x_n, mask, mask, ...]
at n, n + 1, ...: as many as the pass has for each, no more than its own number of drafts needs, and
none beyond the context. They write the draft's cache slots of these positions, which later
extensions and blocks overwrite before anything reads them, and all of them see every key up to the
block's end. So a row's limit, the last key that it sees, is apart from its position. After seeds
(sizes.has_seeds), which have taken the anchor in and proposed the first draft, all rows are masks,
and each sees the keys up to itself. Rows that a request has none of are padding: position 0, slot
-1; the block's limit all the same, or 0.
"""

import torch

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import BLOCK_SIZE


def fill_blocks(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    rows: int,
    mask_token: int,
    max_model_len: int,
) -> None:
    """Lay out `rows` rows of the first batch slots each, padding included, after the committed."""
    if not use_triton(buffers.block_ids):
        fill_blocks_ref(buffers, state, num_reqs, rows, mask_token, max_model_len)
        return
    of_state = state.last_sampled_tokens, state.num_computed_tokens, state.num_draft_tokens
    laid_out = buffers.block_ids, buffers.block_positions, buffers.block_slots, buffers.block_limits
    R, M = state.block_table.shape
    _fill_blocks_kernel[(num_reqs,)](
        *(*laid_out, buffers.sample_mapping, *of_state, state.block_table),
        *(R - 1, M, mask_token, max_model_len),
        ROWS=rows,
        ROWS_PADDED=next_power_of_2(rows),
        EXTRA_ROWS=buffers.sizes.extra_rows,
        S=BLOCK_SIZE,
        num_warps=1,
        **launch_options(buffers.block_ids),
    )


@jit
def _fill_blocks_kernel(
    ids_ptr,  # [B x ROWS]
    positions_ptr,  # [B x ROWS]
    slots_ptr,  # [B x ROWS]
    limits_ptr,  # [B x ROWS]
    sample_ptr,  # [B]
    last_sampled_ptr,  # [R + 1]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1] num_draft_tokens
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    mask_token,
    max_model_len,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,  # 1 of an anchor that proposes nothing, -1 after seeds
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, ROWS_PADDED)
    idx = tl.load(sample_ptr + b)
    row = tl.where(idx < 0, R, idx)
    start = tl.load(num_computed_ptr + row)
    num_drafts = tl.load(num_drafts_ptr + row)
    wanted = tl.minimum(num_drafts + EXTRA_ROWS, ROWS)
    wanted = tl.where((idx >= 0) & (num_drafts > 0), wanted, 0)
    count = tl.maximum(tl.minimum(wanted, max_model_len - start), 0)
    is_live = i < count
    position = start + i
    block = tl.load(block_table_ptr + row * M + position // S, mask=is_live, other=0)
    if EXTRA_ROWS < 0:
        id = mask_token
        limit = tl.where(is_live, position, 0)
    else:
        id = tl.where(i == 0, tl.load(last_sampled_ptr + row), mask_token)
        limit = tl.where(count > 0, start + count - 1, 0) + tl.zeros_like(position)
    at = b * ROWS + i
    inside = i < ROWS
    tl.store(ids_ptr + at, tl.where(is_live, id, 0), mask=inside)
    tl.store(positions_ptr + at, tl.where(is_live, position, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(is_live, block * S + position % S, -1), mask=inside)
    tl.store(limits_ptr + at, limit, mask=inside)


def fill_blocks_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    rows: int,
    mask_token: int,
    max_model_len: int,
) -> None:
    has_seeds = buffers.sizes.has_seeds
    row_B = buffers.sample_mapping[:num_reqs]
    start_B = state.num_computed_tokens[row_B]
    drafts_B = state.num_draft_tokens[row_B]
    is_drafting_B = (row_B >= 0) & (drafts_B > 0)
    own_B = (drafts_B + buffers.sizes.extra_rows).clamp(max=rows)
    wanted_B = torch.where(is_drafting_B, own_B, 0)
    count_B = torch.minimum(wanted_B, max_model_len - start_B).clamp(min=0)
    i_R = torch.arange(rows, device=row_B.device)
    is_live_BR = i_R < count_B[:, None]
    position_BR = torch.where(is_live_BR, start_B[:, None] + i_R, 0)
    is_anchor_R = (i_R == 0) & (not has_seeds)
    id_BR = torch.where(is_anchor_R, state.last_sampled_tokens[row_B, None], mask_token)
    limit_BR = position_BR
    if not has_seeds:
        limit_BR = torch.where(count_B > 0, start_B + count_B - 1, 0)[:, None].expand(-1, rows)
    slot_BR = state.slots(position_BR, row_B[:, None], is_live_BR)
    X = num_reqs * rows
    buffers.block_ids[:X] = torch.where(is_live_BR, id_BR, 0).flatten()
    buffers.block_positions[:X] = position_BR.flatten()
    buffers.block_slots[:X] = slot_BR.flatten()
    buffers.block_limits[:X] = limit_BR.flatten()
