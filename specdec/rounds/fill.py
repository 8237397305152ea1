"""The rows of a step, laid out in the static buffers.

Verify slots come first: for each request its last sampled token and its drafts, at the positions
after its context, gathered on the device; K + 1 rows, or 1 where no request drafts, or the number
that share_rows gave it. Row i of such a slot has position num_computed + i. A row is padding (token
0, position 0, KV slot -1) if its slot is empty, if i exceeds the request's own number of drafts or
the drafts that it has, or if its position lies past max_model_len. Parts of prompts follow: the
host knows their rows, lays them out and copies them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.rounds.upload import upload_all
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE


class Interval(NamedTuple):
    """Batch slots or rows, from `first` to before `end`."""

    first: int
    end: int


def fill_prompts(
    buffers: StepBuffers, parts: Sequence[PromptPart], batch_slots: Interval, rows: Interval
) -> None:
    """Write the parts to these batch slots and rows, the last of which are padding.

    A draft row embeds the token after its own: the next prompt token, even where the part ends
    before it, or the token that this step will sample (draft_sample_slots). A resumed request's
    last sampled token is known, and what is drawn in its place does not count.
    """
    num_reqs = batch_slots.end - batch_slots.first
    num_tokens = rows.end - rows.first
    ids, positions, next_ids = np.zeros((3, num_tokens), np.int64)
    slots, sample_slots = np.full((2, num_tokens), -1)
    state_rows, sample_rows = np.full((2, num_reqs), -1)
    last = np.full(num_reqs, -rows.first)  # padding: row 0 of the step
    starts = np.full(num_reqs + 1, num_tokens)
    start = 0
    for b, part in enumerate(parts):
        here = slice(start, start + part.length)
        position = np.arange(part.start, part.start + part.length)
        ids[here] = part.prompt[part.start : part.start + part.length]
        positions[here] = position
        block = np.asarray(part.blocks)[position // BLOCK_SIZE]
        slots[here] = block * BLOCK_SIZE + position % BLOCK_SIZE
        following = part.prompt[part.start + 1 : part.start + part.length + 1]
        next_ids[start : start + len(following)] = following
        state_rows[b] = part.state_row
        starts[b] = start
        start += part.length
        last[b] = start - 1
        if part.ends_prompt:
            sample_rows[b] = part.state_row
        if part.samples:
            sample_slots[last[b]] = b
    starts[len(parts)] = start
    of_slots = slice(batch_slots.first, None)
    of_rows = slice(rows.first, None)
    upload_all(
        [
            (buffers.input_ids[of_rows], ids),
            (buffers.positions[of_rows], positions),
            (buffers.slot_mapping[of_rows], slots),
            (buffers.draft_input_ids[of_rows], next_ids),
            (buffers.draft_sample_slots[of_rows], sample_slots),
            (buffers.idx_mapping[of_slots], state_rows),
            (buffers.sample_mapping[of_slots], sample_rows),
            (buffers.last_token_indices[of_slots], last + rows.first),
            (buffers.prompt_start_loc, starts),
            # the last row of each part is decided
            (buffers.sample_states[of_rows], sample_rows),
            (buffers.sample_starts[of_rows], np.arange(num_reqs) + rows.first),
        ]
    )


def fill_round(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    max_model_len: int,
    query_len: int,
    shared_rows: int = 0,
) -> None:
    """Gather the rows of each batch slot from the state by buffers.idx_mapping.

    num_reqs: batch slots, padding included
    query_len: rows of each slot
    shared_rows: if not 0, a slot has its share of these instead, by buffers.rows_per_slot; rows
        that no slot takes are padding, and buffers.verify_start_loc says where slots begin
    """
    if not use_triton(buffers.idx_mapping):
        fill_round_ref(buffers, state, num_reqs, max_model_len, query_len, shared_rows)
        return
    rows = buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.num_valid
    decided = buffers.sample_mapping, buffers.sample_states, buffers.sample_starts
    draft_rows = buffers.verify_start_loc, buffers.draft_input_ids
    slots = buffers.idx_mapping, buffers.rows_per_slot
    progress = state.last_sampled_tokens, state.draft_tokens, state.num_computed_tokens
    bounds = state.num_draft_tokens, state.num_nodes, state.block_table
    R, M = state.block_table.shape
    sizes = R - 1, M, max_model_len, state.draft_tokens.shape[1], num_reqs, shared_rows
    _fill_round_kernel[(num_reqs + (shared_rows > 0),)](
        *(*rows, *decided, *draft_rows, *slots, *progress, *bounds, *sizes),
        Q=query_len,
        Q_PADDED=next_power_of_2(query_len),
        SHARES=next_power_of_2(len(buffers.rows_per_slot)) if shared_rows else 0,
        MAY_STOP=state.may_stop,
        S=BLOCK_SIZE,
        num_warps=1,
        **launch_options(buffers.idx_mapping),
    )


@jit(varying=("B", "shared_rows"))
def _fill_round_kernel(
    input_ids_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    num_valid_ptr,  # [B]
    sample_ptr,  # [B]
    states_ptr,  # [T] sample_states
    first_rows_ptr,  # [T] sample_starts
    starts_ptr,  # [B + 1] verify_start_loc, with SHARES
    draft_ids_ptr,  # [T]
    idx_ptr,  # [B]
    rows_per_slot_ptr,  # [B], with SHARES
    last_sampled_ptr,  # [R + 1]
    drafts_ptr,  # [R + 1, X]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1], with MAY_STOP
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    max_model_len,
    X,
    B,
    shared_rows,
    Q: tl.constexpr,
    Q_PADDED: tl.constexpr,
    SHARES: tl.constexpr,
    MAY_STOP: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, Q_PADDED)
    first = b * Q
    count = Q
    if SHARES > 0:
        slot = tl.arange(0, SHARES)
        earlier = tl.load(rows_per_slot_ptr + slot, mask=slot < tl.minimum(b, B), other=0)
        first = tl.sum(earlier, axis=0).to(tl.int32)
        tl.store(starts_ptr + b, first.to(tl.int64))
        if b == B:
            for start in range(first, shared_rows, Q_PADDED):
                is_left = start + i < shared_rows
                zero = tl.zeros((Q_PADDED,), tl.int64)
                tl.store(input_ids_ptr + start + i, zero, mask=is_left)
                tl.store(positions_ptr + start + i, zero, mask=is_left)
                tl.store(draft_ids_ptr + start + i, zero, mask=is_left)
                tl.store(first_rows_ptr + start + i, zero, mask=is_left)
                tl.store(slots_ptr + start + i, zero - 1, mask=is_left)
                tl.store(states_ptr + start + i, zero - 1, mask=is_left)
            return
        count = tl.load(rows_per_slot_ptr + b).to(tl.int32)
    idx = tl.load(idx_ptr + b)
    row = tl.where(idx < 0, R, idx)
    position = tl.load(num_computed_ptr + row) + i
    most = tl.load(num_drafts_ptr + row)
    if MAY_STOP:
        most = tl.minimum(most, tl.load(num_live_ptr + row))
    last = tl.where(idx < 0, -1, tl.minimum(most, count - 1))
    is_valid = (i <= last) & (position < max_model_len)
    draft = tl.load(drafts_ptr + row * X + i - 1, mask=(i > 0) & is_valid, other=0)
    token = tl.where(i == 0, tl.load(last_sampled_ptr + row), draft)
    block = tl.load(block_table_ptr + row * M + position // S, mask=is_valid, other=0)
    at = first + i
    inside = i < count
    tl.store(input_ids_ptr + at, tl.where(is_valid, token, 0), mask=inside)
    tl.store(positions_ptr + at, tl.where(is_valid, position, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(is_valid, block * S + position % S, -1), mask=inside)
    tl.store(states_ptr + at, tl.where(is_valid, idx, -1), mask=inside)
    tl.store(first_rows_ptr + at, tl.zeros_like(position) + first, mask=inside)
    tl.store(num_valid_ptr + b, tl.sum(is_valid.to(tl.int64), axis=0))
    tl.store(sample_ptr + b, idx)


def fill_round_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    max_model_len: int,
    query_len: int,
    shared_rows: int = 0,
) -> None:
    B = num_reqs
    T = shared_rows or B * query_len
    row_B = buffers.idx_mapping[:B]  # -1 for padding, which reads the last row: the scratch row
    counts_B = torch.full_like(row_B, query_len)
    if shared_rows:
        counts_B = buffers.rows_per_slot[:B]
    starts = torch.cat([torch.zeros_like(row_B[:1]), counts_B.cumsum(dim=0)])
    t_T = torch.arange(T, device=row_B.device)
    slot_T = torch.searchsorted(starts[1:], t_T, right=True)  # B: a row that no slot takes
    row_T = torch.cat([row_B, torch.full_like(row_B[:1], -1)])[slot_T]
    first_T = torch.where(slot_T < B, starts[slot_T], 0)
    i_T = t_T - first_T
    position_T = state.num_computed_tokens[row_T] + i_T
    most_R = state.num_draft_tokens
    if state.may_stop:
        most_R = torch.minimum(most_R, state.num_nodes)
    is_own_T = (row_T >= 0) & (i_T <= most_R[row_T])
    is_valid_T = is_own_T & (position_T < max_model_len)
    ids_BX = torch.cat([state.last_sampled_tokens[:, None], state.draft_tokens], dim=1)
    ids_T = ids_BX[row_T, i_T.clamp(max=ids_BX.shape[1] - 1)]

    buffers.input_ids[:T] = torch.where(is_valid_T, ids_T, 0)
    buffers.positions[:T] = torch.where(is_valid_T, position_T, 0)
    buffers.slot_mapping[:T] = state.slots(position_T, row_T, is_valid_T)
    buffers.sample_states[:T] = torch.where(is_valid_T, row_T, -1)
    buffers.sample_starts[:T] = first_T
    room_B = (max_model_len - state.num_computed_tokens[row_B]).clamp(min=0)
    own_B = torch.minimum(counts_B, most_R[row_B] + 1)
    buffers.num_valid[:B] = torch.where(row_B >= 0, torch.minimum(own_B, room_B), 0)
    buffers.sample_mapping[:B] = row_B
    if shared_rows:
        buffers.verify_start_loc[: B + 1] = starts
        buffers.draft_input_ids[:T].masked_fill_(slot_T == B, 0)
