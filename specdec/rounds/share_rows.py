"""Which drafts get a row: the most probable of the whole batch.

Each request has the row of its last sampled token. What is left of `num_rows` goes to the live
drafts with the greatest probability that they and all before them hold (state.draft_probs); of
equals the lower level is first, then the lower batch slot. Probabilities fall along a request's
drafts, so each gets a prefix of them. A request's own bound and the end of the context limit how
many of its drafts take part.
"""

import torch

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState

LEVEL_BITS, SLOT_BITS = 6, 13


def share_rows(
    buffers: StepBuffers, state: RequestState, num_reqs: int, num_rows: int, max_model_len: int
) -> None:
    """Write buffers.rows_per_slot: 0 for padding, else 1 and the slot's share of `num_rows`.

    num_reqs: batch slots, padding included; at most num_rows of them have a request
    """
    if not use_triton(buffers.idx_mapping):
        share_rows_ref(buffers, state, num_reqs, num_rows, max_model_len)
        return
    K, X = buffers.draft_tokens.shape[1], state.draft_tokens.shape[1]
    most = len(buffers.rows_per_slot)
    assert most <= 1 << SLOT_BITS, most
    slots = buffers.rows_per_slot, buffers.idx_mapping, state.draft_probs
    bounds = state.num_nodes, state.num_draft_tokens, state.num_computed_tokens
    sizes = len(state.num_nodes) - 1, X, num_reqs, num_rows, max_model_len
    _share_rows_kernel[(num_reqs,)](
        *(*slots, *bounds, *sizes),
        K=K,
        LEVELS=next_power_of_2(K),
        SLOTS=next_power_of_2(most),
        LEVEL_BITS=LEVEL_BITS,
        SLOT_BITS=SLOT_BITS,
        num_warps=4,
        **launch_options(buffers.idx_mapping),
    )


@jit(varying=("B", "num_rows"))
def _share_rows_kernel(
    rows_per_slot_ptr,  # [B]
    idx_ptr,  # [B]
    probs_ptr,  # [R + 1, X] float32
    num_live_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1]
    num_computed_ptr,  # [R + 1]
    R,
    X,
    B,
    num_rows,
    max_model_len,
    K: tl.constexpr,
    LEVELS: tl.constexpr,
    SLOTS: tl.constexpr,
    LEVEL_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank the drafts of one slot, in each program, among all drafts."""
    begin(PDL)
    me = tl.program_id(0)
    b = tl.arange(0, SLOTS)
    idx = tl.load(idx_ptr + b, mask=b < B, other=-1)
    row = tl.where(idx < 0, R, idx)
    room = max_model_len - 1 - tl.load(num_computed_ptr + row)
    allowed = tl.minimum(tl.load(num_live_ptr + row), tl.load(num_drafts_ptr + row))
    allowed = tl.where(idx < 0, 0, tl.minimum(tl.minimum(allowed, room), K))
    num_left = num_rows - tl.sum((idx >= 0).to(tl.int32), axis=0)
    # the larger key goes first, and no two are equal; 0 where there is no draft
    level = tl.arange(0, LEVELS)
    is_live = level[:, None] < allowed[None, :]
    at = row[None, :] * X + level[:, None]
    prob = tl.load(probs_ptr + at, mask=is_live, other=0.0)
    # -0.0 equals 0.0
    bits = (prob + 0.0).to(tl.int32, bitcast=True).to(tl.int64) + 1
    order = (
        (((1 << LEVEL_BITS) - 1 - level[:, None]) << SLOT_BITS) + (1 << SLOT_BITS) - 1 - b[None, :]
    )
    keys = tl.where(is_live, (bits << (LEVEL_BITS + SLOT_BITS)) + order, 0)
    count = 0
    for i in range(K):
        is_own = (level[:, None] == i) & (b[None, :] == me)
        own = tl.sum(tl.sum(tl.where(is_own, keys, 0), axis=1), axis=0)
        num_before = tl.sum(tl.sum((keys > own).to(tl.int32), axis=1), axis=0)
        count += ((own > 0) & (num_before < num_left)).to(tl.int32)
    is_real = tl.load(idx_ptr + me) >= 0
    tl.store(rows_per_slot_ptr + me, tl.where(is_real, 1 + count, 0).to(tl.int64))


def share_rows_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, num_rows: int, max_model_len: int
) -> None:
    B = num_reqs
    K = buffers.draft_tokens.shape[1]
    row_B = buffers.idx_mapping[:B]
    level_K = torch.arange(K, device=row_B.device)
    room_B = max_model_len - 1 - state.num_computed_tokens[row_B]
    allowed_B = torch.minimum(state.num_nodes[row_B], state.num_draft_tokens[row_B])
    allowed_B = torch.where(row_B >= 0, torch.minimum(allowed_B, room_B), 0)
    is_live_KB = level_K[:, None] < allowed_B
    prob_KB = torch.where(is_live_KB, state.draft_probs[row_B, :K].t(), -1.0)
    # levels, then slots, in order: a stable sort keeps it among equals
    order_X = prob_KB.flatten().sort(descending=True, stable=True).indices
    rank_X = torch.arange(K * B, device=row_B.device)
    rank_KB = torch.empty_like(order_X).scatter_(0, order_X, rank_X).view(K, B)
    num_left = num_rows - (row_B >= 0).sum()
    count_B = (is_live_KB & (rank_KB < num_left)).sum(dim=0)
    buffers.rows_per_slot[:B] = torch.where(row_B >= 0, 1 + count_B, 0)
