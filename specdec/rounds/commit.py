"""What a round decided, written to the results, the state rows and the cache.

The walk goes from the root to the node below it that equals the target's choice, until there is
none; the choice there is the round's last token. So the tokens of a round are the target's choices,
whatever was proposed. With p/q the sampler has said how far it goes (buffers.pq_accepted). The
state row advances by num_accepted + 1; the draft's rows embed the tokens of the round, and its seed
row is that of the last accepted node.

The rows of a chain stay in place, garbage after the accepted ones. Where nodes may be siblings, the
accepted path's keys and values move from the nodes' cache slots to the request's blocks, its tokens
go to the history, and the rows of the step become those of paths, with padding after them;
gather_paths.py brings their features.

`num_reqs` counts padding, which writes the scratch row: every value that the draft's passes read of
a padded batch slot is written here, since each pass may be padded to a size of its own. Results
keep the markers of rows without a choice (best_token.py); what is embedded later is token 0 there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.move_slots import move_slots
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.rounds.buffers import CONFIDENCE_ONE, StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import BLOCK_SIZE, DraftShape


def commit_round(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    kv_cache: Tensor,
    is_pq: bool = False,
) -> None:
    """Commit a round of `num_reqs` batch slots, padding included.

    shape, shared_rows: as in fill.py; paths that are longer than shape.path_len end there
    kv_cache: [L, 2, N + 1, G, S, C] of the target
    is_pq: buffers.pq_accepted bounds how many nodes of a chain hold; the choices are their tokens
    """
    decide = pick(buffers.results, launch_decision, decision_ref)
    decide(buffers, state, num_reqs, shape, shared_rows, is_pq)
    if shape.is_wide:
        num_moves = num_reqs * (shape.path_len - 1)
        move_slots(kv_cache, buffers.moved_from[:num_moves], buffers.moved_to[:num_moves])


def launch_decision(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    is_pq: bool,
) -> None:
    N, Q, has_paths = shape.rows, shape.path_len, shape.is_wide
    columns = buffers.columns
    X = columns.tokens.shape[1]
    slots = buffers.sample_mapping, buffers.num_valid, buffers.verify_start_loc
    verified = buffers.input_ids, buffers.target_tokens, buffers.pq_accepted
    nodes = state.num_nodes, state.draft_parents, state.draft_probs
    proposed = buffers.proposed_tokens, buffers.proposed_parents
    seeds = buffers.last_token_indices, buffers.draft_positions, buffers.draft_slots
    progress = state.num_computed_tokens, state.last_sampled_tokens
    laid_out = buffers.positions, buffers.slot_mapping, buffers.path_sources
    moved = buffers.accepted_rows, buffers.moved_from, buffers.moved_to
    kept = state.block_table, state.sampling.history
    R, M = state.block_table.shape
    sizes = R - 1, M, state.sampling.history.shape[1], buffers.sizes.first_node_slot
    _decision_kernel[(num_reqs,)](
        *(*slots, *verified, *nodes, buffers.results, *proposed, buffers.draft_input_ids, *seeds),
        *(*progress, *laid_out, *moved, *kept, *sizes),
        **{"N": N, "Q": Q, "X": X, "ROWS": next_power_of_2(X + 1), "S": BLOCK_SIZE},
        **{"IS_PQ": is_pq, "IS_SHARED": shared_rows > 0, "HAS_PATHS": has_paths},
        D1=columns.sampled_tokens.shape[1],
        HAS_PARENTS=columns.parents.shape[1] > 0,
        HAS_PROBS=columns.probs.shape[1] > 0,
        ONE=CONFIDENCE_ONE,
        num_warps=1,
        **launch_options(buffers.results),
    )


@jit
def _decision_kernel(
    sample_ptr,  # [B]
    num_valid_ptr,  # [B]
    starts_ptr,  # [B + 1] verify_start_loc, with IS_SHARED or HAS_PATHS
    input_ids_ptr,  # [T]
    target_ptr,  # [T]
    pq_accepted_ptr,  # [B], with IS_PQ
    num_nodes_ptr,  # [R + 1]
    parents_ptr,  # [R + 1, X], with HAS_PATHS
    probs_ptr,  # [R + 1, X] draft_probs, with HAS_PROBS
    results_ptr,  # [B, all] ResultColumns: D1, 1, 1, X; X with HAS_PARENTS; X with HAS_PROBS
    proposed_ptr,  # [B, X]
    proposed_parents_ptr,  # [B, X], with HAS_PARENTS
    draft_ids_ptr,  # [T]
    last_rows_ptr,  # [B] last_token_indices
    draft_positions_ptr,  # [B] of seeds
    draft_slots_ptr,  # [B] of chains
    num_computed_ptr,  # [R + 1]
    last_sampled_ptr,  # [R + 1]
    positions_ptr,  # [T] with HAS_PATHS as all pointers after it; of paths, Q rows for each slot
    slots_ptr,  # [T]
    sources_ptr,  # [B x Q] path_sources
    accepted_ptr,  # [B, D1] accepted_rows
    from_ptr,  # [B x (Q - 1)] moved_from
    to_ptr,  # [B x (Q - 1)] moved_to
    block_table_ptr,  # [R + 1, M]
    history_ptr,  # [R + 1, P]
    R,
    M,
    P,
    first_node_slot,
    N: tl.constexpr,
    Q: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    D1: tl.constexpr,
    S: tl.constexpr,
    IS_PQ: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    b = tl.program_id(0)
    # before the wait what was written before the last product, see overlap.py
    idx = tl.load(sample_ptr + b, cache_modifier=".cg")
    is_real = idx >= 0
    row = tl.where(is_real, idx, R)
    i = tl.arange(0, ROWS)
    first = b * N
    count = N
    if IS_SHARED:
        first = tl.load(starts_ptr + b, cache_modifier=".cg").to(tl.int32)
        count = tl.load(starts_ptr + b + 1, cache_modifier=".cg").to(tl.int32) - first
    inside = i < count
    token = tl.load(input_ids_ptr + first + i, mask=inside, other=0, cache_modifier=".cg")
    num_valid = tl.load(num_valid_ptr + b, cache_modifier=".cg")
    has_root = is_real & (num_valid > 0)  # not beyond the context's end
    is_node = (i > 0) & (i < num_valid)
    is_result = (i > 0) & (i <= X)
    nodes = row * X - 1  # of row 1, less 1
    parent = i - 1
    if HAS_PATHS:
        parent = tl.load(parents_ptr + nodes + i, mask=is_node, other=0, cache_modifier=".cg")
    if HAS_PROBS:
        num_live = tl.load(num_nodes_ptr + row, cache_modifier=".cg")
        is_live = is_result & (i <= num_live) & is_real
        prob = tl.load(probs_ptr + nodes + i, mask=is_live, other=0.0, cache_modifier=".cg")
    num_computed = tl.load(num_computed_ptr + row, cache_modifier=".cg")
    path = first  # where the accepted path's rows are
    if HAS_PATHS:
        tl.static_assert(Q <= S)  # so a path lies in two blocks at most
        path = b * Q
        near = num_computed // S
        blocks_ptr = block_table_ptr + row * M
        near_block = tl.load(blocks_ptr + tl.minimum(near, M - 1), cache_modifier=".cg")
        far_block = tl.load(blocks_ptr + tl.minimum(near + 1, M - 1), cache_modifier=".cg")
    wait_for_inputs(PDL)
    target = tl.load(target_ptr + first + i, mask=inside, other=0)
    most = idx * 0 + Q - 1
    if IS_PQ:
        most = tl.load(pq_accepted_ptr + b, mask=is_real, other=0)  # stale in padding
    out = results_ptr + b * (D1 + 2 + X * (1 + HAS_PARENTS + HAS_PROBS))
    current = idx * 0
    last = idx * 0
    num_accepted = idx * 0
    for depth in range(Q):
        is_here = current >= 0
        choice = tl.sum(tl.where(i == current, target, 0), axis=0)
        is_kept = is_here & has_root
        embedded = tl.where(is_kept, tl.maximum(choice, 0), 0)
        tl.store(out + depth, tl.where(is_here, choice, 0))
        tl.store(draft_ids_ptr + path + depth, embedded, mask=depth < count)
        if HAS_PATHS:
            position = num_computed + depth
            block = tl.where(position // S == near, near_block, far_block)
            slot = tl.where(is_kept, block * S + position % S, -1)
            tl.store(accepted_ptr + b * D1 + depth, current)
            tl.store(positions_ptr + path + depth, tl.where(is_kept, position, 0))
            tl.store(slots_ptr + path + depth, slot)
            tl.store(sources_ptr + path + depth, tl.where(is_kept, first + current, 0))
            if depth > 0:
                move = b * (Q - 1) + depth - 1
                node_slot = first_node_slot + b * X + current - 1
                tl.store(from_ptr + move, tl.where(is_kept, node_slot, -1))
                tl.store(to_ptr + move, slot)
                tl.store(history_ptr + row * P + position, last, mask=is_kept)
        last = tl.where(is_here, choice, last)
        follows = is_node & (parent == current) & (token == choice)
        child = tl.min(tl.where(follows, i, ROWS), axis=0).to(tl.int64)
        current = tl.where((child < ROWS) & (depth < most), child, -1)
        num_accepted += (current >= 0).to(tl.int64)
    zero = tl.zeros((ROWS,), tl.int64)
    tl.store(out + i, zero, mask=(i >= Q) & (i < D1))
    tl.store(out + D1, num_accepted)
    tl.store(out + D1 + 1, tl.maximum(num_valid - 1, 0))
    node_at = D1 + 1 + i  # of row 1 after the two numbers
    tl.store(out + node_at, token, mask=is_result)
    tl.store(proposed_ptr + b * X + i - 1, zero, mask=is_result)
    if HAS_PARENTS:
        node_at += X
        tl.store(out + node_at, tl.where(is_node, parent, 0).to(tl.int64), mask=is_result)
        tl.store(proposed_parents_ptr + b * X + i - 1, zero + i - 1, mask=is_result)
    if HAS_PROBS:
        scaled = tl.maximum((prob * ONE).to(tl.int64), 1)
        tl.store(out + node_at + X, tl.where(is_live, scaled, 0), mask=is_result)
    if HAS_PATHS:
        tl.store(accepted_ptr + b * D1 + i, zero - 1, mask=(i >= Q) & (i < D1))
        tl.store(starts_ptr + b, (b * Q).to(tl.int64))
        tl.store(starts_ptr + b + 1, ((b + 1) * Q).to(tl.int64))
    tl.store(last_rows_ptr + b, tl.where(is_real, path + num_accepted, 0))
    tl.store(draft_positions_ptr + b, tl.where(has_root, num_computed + num_accepted, 0))
    # the levels of chains may be padded further than the pass before them
    tl.store(draft_slots_ptr + b, idx * 0 - 1, mask=idx < 0)
    tl.store(num_nodes_ptr + row, idx * 0)
    tl.store(num_computed_ptr + row, num_computed + num_accepted + 1)
    tl.store(last_sampled_ptr + row, tl.maximum(last, 0))


def decision_ref(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    shape: DraftShape,
    shared_rows: int,
    is_pq: bool,
) -> None:
    B, N, Q, has_paths = num_reqs, shape.rows, shape.path_len, shape.is_wide
    row_B = buffers.sample_mapping[:B]
    num_valid_B = buffers.num_valid[:B]
    starts = torch.arange(B + 1, device=row_B.device) * N
    if shared_rows:
        starts = buffers.verify_start_loc[: B + 1]
    i_N = torch.arange(N, device=row_B.device)
    inside_BN = i_N < starts.diff()[:, None]
    at_BN = torch.where(inside_BN, starts[:-1, None] + i_N, 0)
    target_BN = torch.where(inside_BN, buffers.target_tokens[at_BN], 0)
    token_BN = torch.where(inside_BN, buffers.input_ids[at_BN], 0)
    is_node_BN = (i_N > 0) & (i_N < num_valid_B[:, None])
    parent_BN = (i_N - 1).expand(B, N)
    if has_paths:
        parent_BN = F.pad(state.draft_parents[row_B, : N - 1], (1, 0))
    most_B = torch.full_like(row_B, Q - 1)
    if is_pq:
        most_B = torch.where(row_B >= 0, buffers.pq_accepted[:B], 0)  # stale in padding
    path_BQ = walk(target_BN, token_BN, torch.where(is_node_BN, parent_BN, -2), most_B, Q)
    chosen_BQ = torch.where(path_BQ >= 0, target_BN.gather(1, path_BQ.clamp(min=0)), 0)
    accepted_B = (path_BQ >= 0).sum(dim=1) - 1
    has_root_B = (row_B >= 0) & (num_valid_B > 0)  # not beyond the context's end
    kept_BQ = torch.where(has_root_B[:, None], path_BQ, -1)
    _write_results(buffers, state, token_BN, torch.where(is_node_BN, parent_BN, 0))
    buffers.sampled_tokens[:B, :Q] = chosen_BQ
    buffers.num_accepted[:B] = accepted_B
    ids_BQ = torch.where(kept_BQ >= 0, chosen_BQ.clamp(min=0), 0)
    if has_paths:
        _lay_out_paths(buffers, state, N, path_BQ, kept_BQ)
        # the round's last token is the next one's root
        at_BQ = torch.where(kept_BQ >= 0, state.num_computed_tokens[row_B, None] + i_N[:Q], 0)
        row_BQ = torch.where(kept_BQ >= 0, row_B[:, None], -1)  # the rest: the scratch row
        state.sampling.history[row_BQ[:, 1:], at_BQ[:, 1:]] = chosen_BQ[:, :-1]
        starts = buffers.verify_start_loc[: B + 1]
    t_T = torch.arange(B * Q if has_paths else shared_rows or B * N, device=row_B.device)
    slot_T = torch.searchsorted(starts[1:], t_T, right=True)  # B: a row that no slot takes
    ids_T = F.pad(ids_BQ, (0, 0, 0, 1))[slot_T, (t_T - starts[slot_T]).clamp(max=Q - 1)]
    draft_ids_T = buffers.draft_input_ids[: len(t_T)]
    draft_ids_T.copy_(torch.where(slot_T < B, ids_T, draft_ids_T))
    buffers.last_token_indices[:B] = torch.where(row_B >= 0, starts[:-1] + accepted_B, 0)
    seed_B = state.num_computed_tokens[row_B] + accepted_B
    buffers.draft_positions[:B] = torch.where(has_root_B, seed_B, 0)
    # the levels of chains may be padded further than the pass before them
    buffers.draft_slots[:B].masked_fill_(row_B < 0, -1)
    state.num_computed_tokens[row_B] = seed_B + 1
    state.last_sampled_tokens[row_B] = chosen_BQ.gather(1, accepted_B[:, None])[:, 0].clamp(min=0)
    state.num_nodes[row_B] = 0


def walk(
    target_BN: Tensor, token_BN: Tensor, parent_BN: Tensor, most_B: Tensor, path_len: int
) -> Tensor:
    """Walk rows [B, Q] from the root to where no node below equals the target's choice, then -1.

    target_BN, token_BN: the target's choice after each row; its own token, which no sibling has
    parent_BN: row of each node's parent, -2 for the root and for padding
    most_B: nodes of the longest walk
    """
    row_B = torch.zeros_like(most_B)
    path = [row_B]
    for depth in range(path_len - 1):
        choice_B1 = target_BN.gather(1, row_B.clamp(min=0)[:, None])
        follows_BN = (parent_BN == row_B[:, None]) & (token_BN == choice_B1)
        child_B = follows_BN.long().argmax(dim=1)  # 0, the root, where there is none
        row_B = torch.where((child_B > 0) & (depth < most_B), child_B, -1)
        path.append(row_B)
    return torch.stack(path, dim=1)


def _write_results(
    buffers: StepBuffers, state: RequestState, token_BN: Tensor, parent_BN: Tensor
) -> None:
    """Write what was verified; and propose nothing, as a chain of token 0."""
    B, N = token_BN.shape
    columns = buffers.columns
    row_B1 = buffers.sample_mapping[:B, None]
    buffers.results[:B] = 0
    columns.num_verified_nodes[:B] = (buffers.num_valid[:B, None] - 1).clamp(min=0)
    columns.tokens[:B, : N - 1] = token_BN[:, 1:]
    buffers.proposed_tokens[:B] = 0
    x_X = torch.arange(columns.tokens.shape[1], device=row_B1.device)
    if columns.parents.shape[1] > 0:
        columns.parents[:B, : N - 1] = parent_BN[:, 1:]
        buffers.proposed_parents[:B] = x_X
    if columns.probs.shape[1] > 0:
        is_live_BX = (row_B1 >= 0) & (x_X < state.num_nodes[row_B1])
        scaled_BX = (state.draft_probs[row_B1[:, 0]] * CONFIDENCE_ONE).long().clamp(min=1)
        columns.probs[:B] = torch.where(is_live_BX, scaled_BX, 0)


def _lay_out_paths(
    buffers: StepBuffers, state: RequestState, num_rows: int, path_BQ: Tensor, kept_BQ: Tensor
) -> None:
    """Lay out the rows of paths for the draft, where they come from, and which cache slots move."""
    B, Q = path_BQ.shape
    row_B1 = buffers.sample_mapping[:B, None]
    b_B1 = torch.arange(B, device=path_BQ.device)[:, None]
    is_kept_BQ = kept_BQ >= 0
    position_BQ = state.num_computed_tokens[row_B1] + torch.arange(Q, device=path_BQ.device)
    slot_BQ = state.slots(position_BQ, row_B1, is_kept_BQ)
    X = state.draft_tokens.shape[1]
    node_slot_BQ = buffers.sizes.first_node_slot + b_B1 * X + path_BQ - 1
    source_BQ = torch.where(is_kept_BQ, b_B1 * num_rows + path_BQ, 0)
    buffers.accepted_rows[:B] = F.pad(path_BQ, (0, buffers.accepted_rows.shape[1] - Q), value=-1)
    buffers.positions[: B * Q] = torch.where(is_kept_BQ, position_BQ, 0).flatten()
    buffers.slot_mapping[: B * Q] = slot_BQ.flatten()
    buffers.path_sources[: B * Q] = source_BQ.flatten()
    moved_from_BQ = torch.where(is_kept_BQ, node_slot_BQ, -1)
    buffers.moved_from[: B * (Q - 1)] = moved_from_BQ[:, 1:].flatten()
    buffers.moved_to[: B * (Q - 1)] = slot_BQ[:, 1:].flatten()
    buffers.verify_start_loc[: B + 1] = torch.arange(B + 1, device=path_BQ.device) * Q
