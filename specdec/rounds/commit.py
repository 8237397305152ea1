"""What a step decided, written to the results and the state rows.

A round without p/q accepts a draft token if and only if it is the target's own choice at its
position, so the tokens of a round are the target's choices up to the first draft that differs,
whatever the draft proposed. With p/q the sampler has accepted already (buffers.pq_accepted). The
state row advances by num_accepted + 1; the draft's rows embed the tokens of the round, and its seed
row is row num_accepted. The prompts that end in the step start to generate.

`num_reqs` counts padding, which writes the scratch row: every value that the draft's passes read of
a padded batch slot is written here, since each pass may be padded to a size of its own. Results
keep the markers of rows without a choice (best_token.py); what is embedded later is token 0 there.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import CONFIDENCE_ONE, StepBuffers
from specdec.rounds.fill import Interval
from specdec.rounds.state import RequestState


def accept_and_commit(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    is_pq: bool,
    query_len: int,
    is_shared: bool = False,
) -> None:
    """Commit a round of `num_reqs` batch slots, padding included.

    is_pq: buffers.pq_accepted is the number of accepted drafts, not equality with target_tokens
    query_len: rows of each slot, K + 1, or 1 where no request drafts; the results keep their width,
        with 0 after the rows
    is_shared: a slot has its share of rows instead, by buffers.verify_start_loc
    """
    if not use_triton(buffers.results):
        accept_and_commit_ref(buffers, state, num_reqs, is_pq, query_len, is_shared)
        return
    N = buffers.sampled_tokens.shape[1]
    rows = buffers.results, buffers.draft_input_ids, buffers.last_token_indices
    drafts = buffers.draft_tokens, buffers.draft_positions, buffers.draft_slots
    progress = state.num_computed_tokens, state.last_sampled_tokens, state.num_nodes
    verified = buffers.target_tokens, buffers.positions, buffers.input_ids, buffers.num_valid
    slots = buffers.verify_start_loc, buffers.sample_mapping, buffers.pq_accepted
    _accept_and_commit_kernel[(num_reqs,)](
        *(*rows, *drafts, *progress, state.draft_probs, *verified, *slots),
        len(state.num_computed_tokens) - 1,
        buffers.results.shape[1],
        state.draft_tokens.shape[1],
        Q=query_len,
        N=N,
        N_PADDED=next_power_of_2(N),
        IS_PQ=is_pq,
        IS_SHARED=is_shared,
        KEEPS_PROBS=buffers.confidences.shape[1] > 0,
        ONE=CONFIDENCE_ONE,
        num_warps=1,
        **launch_options(buffers.results),
    )


@jit
def _accept_and_commit_kernel(
    # [B, WIDTH]: sampled tokens [N], number accepted, verified drafts [N - 1], their number; with
    # KEEPS_PROBS the path probabilities [N - 1]; N = K + 1
    results_ptr,
    draft_ids_ptr,  # [T]
    last_rows_ptr,  # [B] last_token_indices
    draft_tokens_ptr,  # [B, N - 1]
    draft_positions_ptr,  # [B]
    draft_slots_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    last_sampled_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1], with KEEPS_PROBS
    probs_ptr,  # [R + 1, X] draft_probs, with KEEPS_PROBS
    target_ptr,  # [T]
    row_positions_ptr,  # [T] positions
    input_ids_ptr,  # [T]
    num_valid_ptr,  # [B]
    starts_ptr,  # [B + 1] verify_start_loc, with IS_SHARED
    sample_ptr,  # [B]
    pq_accepted_ptr,  # [B]
    R,
    WIDTH,
    X,
    Q: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    IS_PQ: tl.constexpr,
    IS_SHARED: tl.constexpr,
    KEEPS_PROBS: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    idx = tl.load(sample_ptr + b)
    is_real = idx >= 0
    row = tl.where(idx < 0, R, idx)
    i = tl.arange(0, N_PADDED)
    first = b * Q
    count = Q
    if IS_SHARED:
        first = tl.load(starts_ptr + b).to(tl.int32)
        count = tl.load(starts_ptr + b + 1).to(tl.int32) - first
    inside = i < count
    target = tl.load(target_ptr + first + i, mask=inside, other=0)
    num_valid = tl.load(num_valid_ptr + b)
    following = i + 1 < tl.minimum(num_valid, count)
    draft = tl.load(input_ids_ptr + first + i + 1, mask=i + 1 < count, other=0)
    if IS_PQ:
        num_accepted = tl.load(pq_accepted_ptr + b, mask=is_real, other=0).to(tl.int32)
    else:
        # the first row whose draft does not hold
        num_accepted = tl.min(tl.where(following & (target == draft), N_PADDED, i), axis=0)
    out = results_ptr + b * WIDTH
    tl.store(out + i, target, mask=i < N)
    tl.store(out + N, num_accepted.to(tl.int64))
    tl.store(out + N + 1 + i, draft, mask=i + 1 < N)
    tl.store(out + 2 * N, tl.maximum(num_valid - 1, 0))
    if KEEPS_PROBS:
        live = i < tl.load(num_live_ptr + row)
        at = probs_ptr + row * X + i
        is_kept = (i + 1 < N) & live & is_real
        prob = tl.load(at, mask=is_kept, other=0.0)
        scaled = tl.maximum((prob * ONE).to(tl.int64), 1)
        tl.store(out + 2 * N + 1 + i, tl.where(is_kept, scaled, 0), mask=i + 1 < N)
        tl.store(num_live_ptr + row, tl.zeros_like(idx))
    tl.store(draft_tokens_ptr + b * (N - 1) + i, tl.zeros_like(draft), mask=i + 1 < N)
    seed = first + num_accepted
    position = tl.load(row_positions_ptr + seed, mask=is_real, other=0)
    tl.store(draft_positions_ptr + b, position)
    # the levels of chains may be padded further than the pass before them
    tl.store(draft_slots_ptr + b, tl.zeros_like(idx) - 1, mask=idx < 0)
    tl.store(draft_ids_ptr + first + i, tl.where(is_real, tl.maximum(target, 0), 0), mask=inside)
    tl.store(last_rows_ptr + b, tl.where(is_real, seed, 0).to(tl.int64))
    tl.store(num_computed_ptr + row, tl.load(num_computed_ptr + row) + num_accepted + 1)
    last = tl.sum(tl.where(i == num_accepted, target, 0), axis=0)
    tl.store(last_sampled_ptr + row, tl.maximum(last, 0))


def accept_and_commit_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    is_pq: bool,
    query_len: int,
    is_shared: bool = False,
) -> None:
    B = num_reqs
    Q = query_len
    row_B = buffers.sample_mapping[:B]
    is_real_B = row_B >= 0
    i_Q = torch.arange(Q, device=row_B.device)
    first_B1 = torch.arange(B, device=row_B.device)[:, None] * Q
    inside_BQ = torch.ones_like(first_B1 + i_Q, dtype=torch.bool)
    if is_shared:
        starts = buffers.verify_start_loc[: B + 1]
        first_B1 = starts[:-1, None]
        inside_BQ = i_Q < starts.diff()[:, None]
    # a row that a slot does not have is replaced by its first, or by that of the first slot
    is_empty_B1 = ~inside_BQ[:, :1]
    at_BQ = torch.where(inside_BQ, first_B1 + i_Q, torch.where(is_empty_B1, 0, first_B1))
    target_BQ = torch.where(inside_BQ, buffers.target_tokens[at_BQ], 0)
    draft_BK = torch.where(inside_BQ, buffers.input_ids[at_BQ], 0)[:, 1:]
    accepted_B = torch.where(is_real_B, buffers.pq_accepted[:B], 0)  # stale in padding
    if not is_pq:
        accepted_B = accept_equal(target_BQ, draft_BK, buffers.num_valid[:B])
    buffers.results[:B] = 0
    buffers.sampled_tokens[:B, :Q] = target_BQ
    buffers.num_accepted[:B] = accepted_B
    buffers.verified_tokens[:B, : Q - 1] = draft_BK
    buffers.num_verified[:B] = (buffers.num_valid[:B] - 1).clamp(min=0)
    K = buffers.confidences.shape[1]
    if K > 0:
        is_live_BK = torch.arange(K, device=row_B.device) < state.num_nodes[row_B, None]
        is_kept_BK = is_live_BK & is_real_B[:, None]
        kept_BK = torch.where(is_kept_BK, state.draft_probs[row_B, :K], 0)
        scaled_BK = (kept_BK * CONFIDENCE_ONE).long().clamp(min=1)
        buffers.confidences[:B] = torch.where(is_kept_BK, scaled_BK, 0)
        state.num_nodes[row_B] = 0
    buffers.draft_tokens[:B] = 0
    buffers.draft_slots[:B][~is_real_B] = -1
    ids_BQ = torch.where(is_real_B[:, None], target_BQ.clamp(min=0), 0)
    ids_BQ = torch.where(inside_BQ, ids_BQ, torch.where(is_empty_B1, ids_BQ[:1, :1], ids_BQ[:, :1]))
    buffers.draft_input_ids[at_BQ.view(-1)] = ids_BQ.view(-1)
    last_B = torch.where(is_real_B, first_B1[:, 0] + accepted_B, 0)
    buffers.last_token_indices[:B] = last_B
    buffers.draft_positions[:B] = torch.where(is_real_B, buffers.positions[last_B], 0)
    state.num_computed_tokens[row_B] = state.num_computed_tokens[row_B] + accepted_B + 1
    state.last_sampled_tokens[row_B] = target_BQ.gather(1, accepted_B[:, None])[:, 0].clamp(min=0)


def accept_equal(target_tokens_BQ: Tensor, draft_tokens_BK: Tensor, num_valid_B: Tensor) -> Tensor:
    """How many drafts [B] equal the target's tokens, 0..K, up to the first that does not.

    num_valid_B: rows that are not padding; the draft in a padded row is never accepted
    """
    K = draft_tokens_BK.shape[1]
    row_K = torch.arange(1, K + 1, device=draft_tokens_BK.device)
    holds_BK = (target_tokens_BQ[:, :K] == draft_tokens_BK) & (row_K < num_valid_B[:, None])
    return holds_BK.cumprod(dim=1).sum(dim=1)


def commit_prompts(
    buffers: StepBuffers, state: RequestState, batch_slots: Interval, rows: Interval
) -> None:
    """Start the requests whose prompt ended: their last draft row embeds the sampled token.

    batch_slots: of parts of prompts, padding included. rows: theirs, and the first choice is there.
    A resumed request takes the token that it sampled before its preemption, which its last draft
    row embeds.
    """
    if not use_triton(buffers.results):
        commit_prompts_ref(buffers, state, batch_slots, rows)
        return
    drafts = buffers.draft_input_ids, buffers.draft_tokens, buffers.draft_positions
    progress = state.num_computed_tokens, state.last_sampled_tokens, state.num_nodes
    chosen = buffers.target_tokens, buffers.positions, buffers.draft_sample_slots
    slots = buffers.last_token_indices, buffers.sample_mapping
    R, WIDTH = len(state.num_computed_tokens) - 1, buffers.results.shape[1]
    sizes = batch_slots.first, rows.first, R, WIDTH
    _commit_prompts_kernel[(batch_slots.end - batch_slots.first,)](
        *(buffers.results, *drafts, *progress, *chosen, *slots, *sizes),
        K=buffers.draft_tokens.shape[1],
        N_PADDED=next_power_of_2(WIDTH),
        num_warps=1,
        **launch_options(buffers.results),
    )


@jit(varying=("first_slot", "first_row"))
def _commit_prompts_kernel(
    results_ptr,  # [B, WIDTH]: the first one is the sampled token
    draft_ids_ptr,  # [T]
    draft_tokens_ptr,  # [B, K]
    draft_positions_ptr,  # [B]
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
    R,
    WIDTH,
    K: tl.constexpr,
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
    chosen = tl.load(target_ptr + first_row + b)
    sampled = tl.where((idx >= 0) & (is_drawn == 0), known, chosen)
    i = tl.arange(0, N_PADDED)
    tl.store(results_ptr + slot * WIDTH + i, tl.where(i == 0, sampled, 0), mask=i < WIDTH)
    tl.store(draft_tokens_ptr + slot * K + i, tl.zeros((N_PADDED,), tl.int64), mask=i < K)
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
    chosen_B = buffers.target_tokens[rows.first : rows.first + len(row_B)]
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
    buffers.draft_tokens[here] = 0
