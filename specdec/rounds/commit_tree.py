"""What a step decided about draft trees, written to the results, the state rows and the cache.

The walk goes from the root to the child that equals the target's choice, until there is none; the
choice there is the round's last token. The path's keys and values move from the nodes' cache slots
to the places of their positions in the request's blocks. Then the rows of the step are those of a
chain, the accepted path and padding after it: what the draft's prefill reads. gather_paths.py
brings what they need. The draft may propose a chain after it.

`num_reqs` counts padding, which writes the scratch row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.move_slots import move_slots
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.rounds.buffers import CONFIDENCE_ONE, StepBuffers
from specdec.rounds.state import RequestState
from specdec.rounds.tree import walk
from specdec.sizes import BLOCK_SIZE


class TreeRows(NamedTuple):
    """The rows that each slot verifies, and the most that an accepted path has."""

    num_rows: int  # N
    path_len: int  # Q, at most N: paths are laid out first, the rows of prompts after them


def commit_trees(
    buffers: StepBuffers,
    state: RequestState,
    num_reqs: int,
    rows: TreeRows,
    kv_cache: Tensor,
    has_words: bool,
) -> None:
    """Commit a round of `num_reqs` batch slots, padding included. Longer paths end early.

    kv_cache:  [L, 2, N + 1, G, S, C] of the target
    has_words: a request has bad words, and its history is kept
    """
    assert rows.path_len <= rows.num_rows, rows
    walk_trees = pick(buffers.results, launch_walk_trees, walk_trees_ref)
    walk_trees(buffers, state, num_reqs, rows, has_words)
    tree = buffers.of_trees
    X = num_reqs * (rows.path_len - 1)
    move_slots(kv_cache, tree.moved_from[:X], tree.moved_to[:X])


def launch_walk_trees(
    buffers: StepBuffers, state: RequestState, num_reqs: int, rows: TreeRows, has_words: bool
) -> None:
    tree = buffers.of_trees
    X = tree.shape.num_nodes
    path_rows = buffers.results, buffers.positions, buffers.slot_mapping, buffers.verify_start_loc
    seeds = buffers.draft_input_ids, buffers.last_token_indices
    drafts = buffers.draft_tokens, buffers.draft_positions, buffers.draft_slots
    paths = tree.walked, tree.path_sources, tree.moved_from, tree.moved_to
    progress = state.num_computed_tokens, state.last_sampled_tokens, state.num_nodes
    kept = state.draft_probs, state.sampling.history
    verified = buffers.target_tokens, buffers.input_ids, buffers.sample_states, tree.parents
    slots = buffers.sample_mapping, state.block_table
    R, M = state.block_table.shape
    widths = buffers.results.shape[1], state.sampling.history.shape[1]
    _walk_trees_kernel[(num_reqs,)](
        *(*path_rows, *seeds, *drafts, *paths, *progress, *kept, *verified, *slots),
        *(R - 1, M, *widths, tree.first_slot),
        N=rows.num_rows,
        Q=rows.path_len,
        X=X,
        ROWS=next_power_of_2(X + 1),
        D1=tree.shape.path_len,
        S=BLOCK_SIZE,
        HAS_WORDS=has_words,
        ONE=CONFIDENCE_ONE,
        num_warps=1,
        **launch_options(buffers.results),
    )


@jit
def _walk_trees_kernel(
    # [B, WIDTH]: sampled tokens [D1], number accepted, verified nodes [X], their number, the rows
    # of their parents [X], the probabilities of their paths [X]; of N - 1 nodes, then of none
    results_ptr,
    positions_ptr,  # [T] from here on of paths, Q rows for each slot
    slots_ptr,  # [T]
    starts_ptr,  # [B + 1] verify_start_loc
    draft_ids_ptr,  # [T]
    last_rows_ptr,  # [B] last_token_indices
    draft_tokens_ptr,  # [B, D1 - 1] of chains
    draft_positions_ptr,  # [B] of seeds
    draft_slots_ptr,  # [B] of chains
    walked_ptr,  # [B, D1]
    sources_ptr,  # [B x Q] path_sources
    from_ptr,  # [B x (Q - 1)] moved_from
    to_ptr,  # [B x (Q - 1)] moved_to
    num_computed_ptr,  # [R + 1]
    last_sampled_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1]
    probs_ptr,  # [R + 1, X] draft_probs
    history_ptr,  # [R + 1, P], with HAS_WORDS
    target_ptr,  # [T]
    input_ids_ptr,  # [T]
    states_ptr,  # [T] sample_states
    parents_ptr,  # [T]
    sample_ptr,  # [B]
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    WIDTH,
    P,
    first_slot,
    N: tl.constexpr,
    Q: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    D1: tl.constexpr,
    S: tl.constexpr,
    HAS_WORDS: tl.constexpr,
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
    inside = i < N
    is_row = inside & (i > 0)
    is_result = (i > 0) & (i <= X)
    first = b * N
    token = tl.load(input_ids_ptr + first + i, mask=inside, other=0, cache_modifier=".cg")
    parent = tl.load(parents_ptr + first + i, mask=inside, other=-1, cache_modifier=".cg")
    state = tl.load(states_ptr + first + i, mask=inside, other=-1, cache_modifier=".cg")
    is_node = is_row & (state >= 0)
    has_root = tl.max(tl.where(i == 0, state, -1), axis=0) >= 0  # not beyond the context's end
    prob_at = probs_ptr + row * X + i - 1
    prob = tl.load(prob_at, mask=is_node, other=0.0, cache_modifier=".cg")
    num_computed = tl.load(num_computed_ptr + row, cache_modifier=".cg")
    tl.static_assert(Q <= S)  # so a path lies in two blocks at most
    near = num_computed // S
    blocks_ptr = block_table_ptr + row * M
    near_block = tl.load(blocks_ptr + tl.minimum(near, M - 1), cache_modifier=".cg")
    far_block = tl.load(blocks_ptr + tl.minimum(near + 1, M - 1), cache_modifier=".cg")
    wait_for_inputs(PDL)
    target = tl.load(target_ptr + first + i, mask=inside, other=0)
    out = results_ptr + b * WIDTH
    current = idx * 0
    last = idx * 0
    num_accepted = idx * 0
    for depth in range(Q):
        is_here = current >= 0
        choice = tl.sum(tl.where(i == current, target, 0), axis=0)
        tl.store(walked_ptr + b * D1 + depth, current)
        tl.store(out + depth, tl.where(is_here, choice, 0))
        is_kept = is_here & has_root
        position = num_computed + depth
        block = tl.where(position // S == near, near_block, far_block)
        slot = tl.where(is_kept, block * S + position % S, -1)
        at = b * Q + depth
        tl.store(positions_ptr + at, tl.where(is_kept, position, 0))
        tl.store(slots_ptr + at, slot)
        tl.store(draft_ids_ptr + at, tl.where(is_kept, tl.maximum(choice, 0), 0))
        tl.store(sources_ptr + at, tl.where(is_kept, first + current, 0))
        if depth > 0:
            move = b * (Q - 1) + depth - 1
            node_slot = first_slot + b * X + current - 1
            tl.store(from_ptr + move, tl.where(is_kept, node_slot, -1))
            tl.store(to_ptr + move, slot)
            if HAS_WORDS:
                tl.store(history_ptr + row * P + position, last, mask=is_kept)
        last = tl.where(is_here, choice, last)
        follows = is_node & (parent == current) & (token == choice) & is_here
        child = tl.min(tl.where(follows, i, ROWS), axis=0).to(tl.int64)
        current = tl.where((child < ROWS) & (depth + 1 < Q), child, -1)
        num_accepted += (current >= 0).to(tl.int64)
    for depth in range(Q, D1):
        tl.store(walked_ptr + b * D1 + depth, idx * 0 - 1)
        tl.store(out + depth, idx * 0)
    for depth in range(1, D1):
        tl.store(draft_tokens_ptr + b * (D1 - 1) + depth - 1, idx * 0)
    tl.store(out + D1, num_accepted)
    tl.store(out + D1 + i, token, mask=is_result)
    tl.store(out + D1 + X + 1, tl.sum(is_node.to(tl.int64), axis=0))
    tl.store(out + D1 + X + 1 + i, tl.where(is_node, parent, -1), mask=is_result)
    scaled = tl.maximum((prob * ONE).to(tl.int64), 1)
    tl.store(out + D1 + 2 * X + 1 + i, tl.where(is_node, scaled, 0), mask=is_result)
    tl.store(draft_positions_ptr + b, tl.where(has_root, num_computed + num_accepted, 0))
    # the levels of chains may be padded further than the pass before them
    tl.store(draft_slots_ptr + b, idx * 0 - 1, mask=idx < 0)
    tl.store(num_live_ptr + row, idx * 0)
    tl.store(starts_ptr + b, (b * Q).to(tl.int64))
    tl.store(starts_ptr + b + 1, ((b + 1) * Q).to(tl.int64))
    tl.store(last_rows_ptr + b, tl.where(is_real, b * Q + num_accepted, 0))
    tl.store(num_computed_ptr + row, num_computed + num_accepted + 1)
    tl.store(last_sampled_ptr + row, tl.maximum(last, 0))


def walk_trees_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, rows: TreeRows, has_words: bool
) -> None:
    tree = buffers.of_trees
    B = num_reqs
    N, Q = rows
    of_rows = (buffers.target_tokens, buffers.input_ids, tree.parents, buffers.sample_states)
    target_BN, tokens_BN, parents_BN, state_BN = (x[: B * N].view(B, N) for x in of_rows)
    is_node_BN = state_BN >= 0
    has_root_B1 = is_node_BN[:, :1].clone()  # not beyond the context's end
    is_node_BN[:, 0] = False
    path_BQ = walk(target_BN, tokens_BN, parents_BN, is_node_BN, Q - 1)
    is_path_BQ = path_BQ >= 0
    chosen_BQ = torch.where(is_path_BQ, target_BN.gather(1, path_BQ.clamp(min=0)), 0)
    accepted_B = is_path_BQ.sum(dim=1) - 1
    for column, value_BQ, of_none in (
        (tree.walked, path_BQ, -1),
        (buffers.sampled_tokens, chosen_BQ, 0),
    ):
        column[:B] = of_none
        column[:B, :Q] = value_BQ
    buffers.num_accepted[:B] = accepted_B
    tree.num_verified[:B] = is_node_BN.sum(dim=1)
    prob_BX = state.draft_probs[buffers.sample_mapping[:B], : N - 1]
    scaled_BX = (prob_BX * CONFIDENCE_ONE).long().clamp(min=1)
    found = (
        (tree.verified_nodes, tokens_BN[:, 1:], 0),
        (tree.verified_parents, torch.where(is_node_BN, parents_BN, -1)[:, 1:], -1),
        (tree.verified_probs, torch.where(is_node_BN[:, 1:], scaled_BX, 0), 0),
    )
    for column, value_BX, of_none in found:
        column[:B] = of_none
        column[:B, : N - 1] = value_BX
    _lay_out_paths(buffers, state, N, path_BQ.where(has_root_B1, -1), chosen_BQ, accepted_B)
    row_B = buffers.sample_mapping[:B]
    if has_words:
        _keep_history(buffers, state, chosen_BQ, accepted_B)
    seed_B = state.num_computed_tokens[row_B] + accepted_B
    buffers.draft_positions[:B] = torch.where(has_root_B1[:, 0], seed_B, 0)
    state.num_computed_tokens[row_B] = seed_B + 1
    last_B1 = chosen_BQ.gather(1, accepted_B[:, None])
    state.last_sampled_tokens[row_B] = last_B1[:, 0].clamp(min=0)
    state.num_nodes[row_B] = 0
    # the levels of a chain may be padded further than the pass before them
    buffers.draft_tokens[:B] = 0
    buffers.draft_slots[:B].masked_fill_(row_B < 0, -1)


def _lay_out_paths(
    buffers: StepBuffers,
    state: RequestState,
    num_rows: int,
    path_BQ: Tensor,
    chosen_BQ: Tensor,
    accepted_B: Tensor,
) -> None:
    """Lay out the rows of paths for the draft, where they come from, and which cache slots move."""
    tree = buffers.of_trees
    B, Q = path_BQ.shape
    row_B1 = buffers.sample_mapping[:B, None]
    is_kept_BQ = (path_BQ >= 0) & (row_B1 >= 0)
    depth_Q = torch.arange(Q, device=path_BQ.device)
    position_BQ = state.num_computed_tokens[row_B1] + depth_Q
    slot_BQ = state.slots(position_BQ, row_B1, is_kept_BQ)
    slot_B1 = torch.arange(B, device=path_BQ.device)[:, None]
    first_B1 = slot_B1 * num_rows
    from_BQ = tree.first_slot + slot_B1 * tree.shape.num_nodes + path_BQ - 1
    buffers.positions[: B * Q] = torch.where(is_kept_BQ, position_BQ, 0).view(-1)
    buffers.slot_mapping[: B * Q] = slot_BQ.view(-1)
    ids_BQ = torch.where(is_kept_BQ, chosen_BQ.clamp(min=0), 0)
    buffers.draft_input_ids[: B * Q] = ids_BQ.view(-1)
    tree.path_sources[: B * Q] = torch.where(is_kept_BQ, first_B1 + path_BQ, 0).view(-1)
    from_BQ = torch.where(is_kept_BQ, from_BQ, -1)
    tree.moved_from[: B * (Q - 1)] = from_BQ[:, 1:].flatten()
    tree.moved_to[: B * (Q - 1)] = slot_BQ[:, 1:].flatten()
    buffers.verify_start_loc[: B + 1] = torch.arange(B + 1, device=path_BQ.device) * Q
    last_B = slot_B1[:, 0] * Q + accepted_B
    buffers.last_token_indices[:B] = torch.where(row_B1[:, 0] >= 0, last_B, 0)


def _keep_history(
    buffers: StepBuffers, state: RequestState, chosen_BQ: Tensor, accepted_B: Tensor
) -> None:
    """Keep the accepted tokens by position; the last token of the round is the next one's root."""
    row_B1 = buffers.sample_mapping[: len(chosen_BQ), None]
    i_Q = torch.arange(chosen_BQ.shape[1], device=chosen_BQ.device)
    is_kept_BQ = i_Q < accepted_B[:, None]
    position_BQ = state.num_computed_tokens[row_B1] + 1 + i_Q
    row_BQ = torch.where(is_kept_BQ, row_B1, -1)  # the rest goes to the scratch row
    history = state.sampling.history
    history[row_BQ, torch.where(is_kept_BQ, position_BQ, 0)] = chosen_BQ
