"""Parts of prompts: their rows, laid out by the host, and what a step decided after them.

They come after the slots and rows that verify. A draft row embeds the token after its own: the next
prompt token, even where the part ends before it, or the token that the step samples
(buffers.draft_sample_slots). A resumed request's last sampled token is known, and what is drawn in
its place does not count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

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
    buffers: StepBuffers,
    parts: Sequence[PromptPart],
    batch_slots: Interval,
    rows: Interval,
    tiles_X3: np.ndarray,
) -> None:
    """Write the parts to these batch slots and rows, the last of which are padding.

    tiles: the listed tiles of the step, where one graph serves it
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
            (buffers.listed_tiles.view(-1), tiles_X3.reshape(-1)),
            # the last row of each part is decided
            (buffers.sample_states[of_rows], sample_rows[: len(parts)]),
            (buffers.sample_starts[of_rows], np.arange(len(parts)) + rows.first),
        ]
    )


def commit_prompts(
    buffers: StepBuffers, state: RequestState, batch_slots: Interval, rows: Interval
) -> None:
    """Start the requests whose prompt ended: their last draft row embeds the sampled token.

    batch_slots: of parts of prompts, padding included. rows: theirs, and the first choice is there;
        padding has no row
    """
    if not use_triton(buffers.results):
        commit_prompts_ref(buffers, state, batch_slots, rows)
        return
    drafts = buffers.draft_input_ids, buffers.draft_positions
    proposed = buffers.proposed_tokens, buffers.proposed_parents
    progress = state.num_computed_tokens, state.last_sampled_tokens, state.num_nodes
    chosen = buffers.target_tokens, buffers.positions, buffers.draft_sample_slots
    slots = buffers.last_token_indices, buffers.sample_mapping
    R, WIDTH = len(state.num_computed_tokens) - 1, buffers.results.shape[1]
    sizes = batch_slots.first, *rows, R, WIDTH
    _commit_prompts_kernel[(batch_slots.end - batch_slots.first,)](
        *(buffers.results, *drafts, *proposed, *progress, *chosen, *slots, *sizes),
        X=buffers.proposed_tokens.shape[1],
        HAS_PARENTS=buffers.proposed_parents.shape[1] > 0,
        N_PADDED=next_power_of_2(WIDTH),
        num_warps=1,
        **launch_options(buffers.results),
    )


@jit(varying=("first_slot", "first_row", "end_row"))
def _commit_prompts_kernel(
    results_ptr,  # [B, WIDTH]: the first one is the sampled token
    draft_ids_ptr,  # [T]
    draft_positions_ptr,  # [B]
    proposed_ptr,  # [B, X]
    proposed_parents_ptr,  # [B, X], with HAS_PARENTS
    num_computed_ptr,  # [R + 1]
    last_sampled_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1]
    target_ptr,  # [T]
    positions_ptr,  # [T]
    sample_slots_ptr,  # [T] draft_sample_slots
    last_rows_ptr,  # [B] last_token_indices
    sample_ptr,  # [B]
    first_slot,
    first_row,
    end_row,
    R,
    WIDTH,
    X: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    N_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    slot = first_slot + b
    idx = tl.load(sample_ptr + slot)
    row = tl.where(idx < 0, R, idx)
    last = tl.load(last_rows_ptr + slot)
    is_drawn = (idx >= 0) & (tl.load(sample_slots_ptr + last) == b)
    known = tl.load(draft_ids_ptr + last)
    chosen = tl.load(target_ptr + first_row + b, mask=first_row + b < end_row, other=0)
    sampled = tl.where((idx >= 0) & (is_drawn == 0), known, chosen)
    i = tl.arange(0, N_PADDED)
    tl.store(results_ptr + slot * WIDTH + i, tl.where(i == 0, sampled, 0), mask=i < WIDTH)
    zero = tl.zeros((N_PADDED,), tl.int64)
    tl.store(proposed_ptr + slot * X + i, zero, mask=i < X)
    if HAS_PARENTS:
        tl.store(proposed_parents_ptr + slot * X + i, zero + i, mask=i < X)
    # a marker below 0 ends the request; until the host sees it, it must not pass for an id
    token = tl.maximum(sampled, 0)
    tl.store(last_sampled_ptr + row, token)
    position = tl.load(positions_ptr + last)
    tl.store(draft_positions_ptr + slot, tl.where(idx < 0, 0, position))
    tl.store(num_computed_ptr + row, position + 1)
    tl.store(num_live_ptr + row, tl.zeros_like(idx))
    tl.store(draft_ids_ptr + last, token, mask=is_drawn)


def commit_prompts_ref(
    buffers: StepBuffers, state: RequestState, batch_slots: Interval, rows: Interval
) -> None:
    here = slice(*batch_slots)
    row_B = buffers.sample_mapping[here]
    last_B = buffers.last_token_indices[here]
    chosen_B = buffers.target_tokens[slice(*rows)][: len(row_B)]
    chosen_B = F.pad(chosen_B, (0, len(row_B) - len(chosen_B)))
    b = torch.arange(len(row_B), device=row_B.device)
    is_drawn_B = (row_B >= 0) & (buffers.draft_sample_slots[last_B] == b)
    known_B = buffers.draft_input_ids[last_B]
    sampled_B = torch.where((row_B >= 0) & ~is_drawn_B, known_B, chosen_B)
    buffers.results[here] = 0
    buffers.sampled_tokens[here, 0] = sampled_B
    token_B = sampled_B.clamp(min=0)
    state.last_sampled_tokens[row_B] = token_B
    position_B = buffers.positions[last_B]
    buffers.draft_positions[here] = torch.where(row_B < 0, 0, position_B)
    state.num_computed_tokens[row_B] = position_B + 1
    state.num_nodes[row_B] = 0
    # padding points at row 0, which may be another slot's: it adds nothing to it
    change_B = torch.where(is_drawn_B, token_B - known_B, 0)
    buffers.draft_input_ids.index_add_(0, last_B, change_B)
    buffers.proposed_tokens[here] = 0
    X = buffers.proposed_parents.shape[1]
    buffers.proposed_parents[here] = torch.arange(X, device=row_B.device)
