"""What a step decided about draft trees, written to the results, the state rows and the cache.

The walk goes from the root to the child that equals the target's choice, as long as there is one;
the choice where it ends is the round's last token. The path's keys and values move from the nodes'
cache slots to the places of their positions in the request's blocks. `gather_paths` then turns the
rows of the step into those of a chain, the accepted path and padding behind it: what the draft's
prefill reads. `num_reqs` counts padding, which writes the scratch row.
"""

import torch
from torch import Tensor

from specdec.proposal.tree import walk
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState
from specdec.stepping.tree_buffers import TreeBuffers


def commit_trees(
    buffers: StepBuffers, state: RequestState, num_reqs: int, kv_cache: Tensor, has_words: bool
) -> None:
    """Commit a round of `num_reqs` batch slots, padding included.

    kv_cache:  [L, 2, N + 1, G, S, C] of the target
    has_words: a request has bad words, and its history is kept
    """
    tree = _tree(buffers)
    B = num_reqs
    K = tree.shape.num_levels
    target_BN = _by_slot(buffers.target_tokens, B, tree)
    tokens_BN = _by_slot(buffers.input_ids, B, tree)
    parents_BN = _by_slot(tree.parents, B, tree)
    is_node_BN = _by_slot(buffers.sample_states, B, tree) >= 0
    is_node_BN[:, 0] = False
    path_BQ = tree.walked[:B] = walk(target_BN, tokens_BN, parents_BN, is_node_BN, K)
    is_accepted_BQ = path_BQ >= 0
    chosen_BQ = torch.where(is_accepted_BQ, target_BN.gather(1, path_BQ.clamp(min=0)), 0)
    accepted_B = is_accepted_BQ.sum(dim=1) - 1
    buffers.sampled_tokens[:B] = chosen_BQ
    buffers.num_accepted[:B] = accepted_B
    buffers.verified_tokens[:B] = tokens_BN[:, 1:]
    buffers.num_verified[:B] = is_node_BN.sum(dim=1)
    buffers.verified_parents[:B] = torch.where(is_node_BN, parents_BN, -1)[:, 1:]
    buffers.draft_tokens[:B] = 0
    _move_paths(buffers, state, B, kv_cache)
    row_B = buffers.sample_mapping[:B]
    if has_words:
        _keep_history(buffers, state, chosen_BQ, accepted_B)
    state.num_computed_tokens[row_B] = state.num_computed_tokens[row_B] + accepted_B + 1
    last_B1 = chosen_BQ.gather(1, accepted_B[:, None])
    state.last_sampled_tokens[row_B] = last_B1[:, 0].clamp(min=0)


def gather_paths(
    buffers: StepBuffers, state: RequestState, num_reqs: int, num_prompt_rows: int, num_rows: int
) -> None:
    """Lay the rows out anew: D + 1 for each of `num_reqs` slots, then prompts, then padding.

    num_prompt_rows: those that follow the rows of trees. num_rows: the rows that are written
    """
    tree = _tree(buffers)
    B = num_reqs
    Q = tree.shape.num_levels + 1
    N = tree.shape.num_nodes + 1
    path_BQ = tree.walked[:B]
    row_B1 = buffers.sample_mapping[:B, None]
    t_T = torch.arange(num_rows, device=path_BQ.device)
    first_B1 = torch.arange(0, B * N, N, device=path_BQ.device)[:, None]
    prompt_T = t_T[B * Q :] + B * (N - Q)
    prompt_T = torch.where(t_T[B * Q :] < B * Q + num_prompt_rows, prompt_T, -1)
    is_path_BQ = (path_BQ >= 0) & (row_B1 >= 0)
    at_BQ = torch.where(is_path_BQ, first_B1 + path_BQ, -1)
    at_T = torch.cat([at_BQ.flatten(), prompt_T])
    is_row_T = at_T >= 0
    at_T = at_T.clamp(min=0)

    position_T = torch.where(is_row_T, buffers.positions[at_T], 0)
    slot_BQ = state.slots(position_T[: B * Q].view(B, Q), row_B1, is_path_BQ)
    slot_T = torch.cat([slot_BQ.flatten(), buffers.slot_mapping[at_T[B * Q :]]])
    ids_BQ = buffers.sampled_tokens[:B].clamp(min=0)
    ids_T = torch.cat([ids_BQ.flatten(), buffers.draft_input_ids[at_T[B * Q :]]])
    buffers.positions[:num_rows] = position_T
    buffers.slot_mapping[:num_rows] = torch.where(is_row_T, slot_T, -1)
    buffers.draft_input_ids[:num_rows] = torch.where(is_row_T, ids_T, 0)
    features_TE = buffers.features
    features_TE[:num_rows] = features_TE[at_T]
    last = buffers.last_token_indices
    last.copy_(torch.where(last >= B * N, last - B * (N - Q), last))
    end_B = torch.arange(0, B * Q, Q, device=last.device) + buffers.num_accepted[:B]
    last[:B] = torch.where(row_B1[:, 0] >= 0, end_B, 0)


def _tree(buffers: StepBuffers) -> TreeBuffers:
    assert buffers.tree is not None, "buffers of an engine that drafts chains"
    return buffers.tree


def _by_slot(rows_T: Tensor, num_reqs: int, tree: TreeBuffers) -> Tensor:
    """[B, N] of the rows of trees."""
    N = tree.shape.num_nodes + 1
    return rows_T[: num_reqs * N].view(num_reqs, N)


def _move_paths(buffers: StepBuffers, state: RequestState, num_reqs: int, kv_cache: Tensor) -> None:
    """Keys and values of accepted nodes, to where plain decoding would have put them."""
    tree = _tree(buffers)
    B = num_reqs
    S = kv_cache.shape[4]
    path_BD = tree.walked[:B, 1:]
    row_B1 = buffers.sample_mapping[:B, None]
    is_moved_BD = (path_BD >= 0) & (row_B1 >= 0)
    depth_D = torch.arange(1, path_BD.shape[1] + 1, device=path_BD.device)
    position_BD = state.num_computed_tokens[row_B1] + depth_D
    from_BD = tree.node_slots(B).gather(1, (path_BD - 1).clamp(min=0))
    to_BD = state.slots(position_BD, row_B1, is_moved_BD)
    # what does not move is a slot of the last block, which only padding writes
    unused = (kv_cache.shape[2] - 1) * S
    from_X = torch.where(is_moved_BD, from_BD, unused).flatten()
    to_X = torch.where(is_moved_BD, to_BD, unused).flatten()
    moved = kv_cache[:, :, from_X // S, :, from_X % S]
    kv_cache[:, :, to_X // S, :, to_X % S] = moved


def _keep_history(
    buffers: StepBuffers, state: RequestState, chosen_BQ: Tensor, accepted_B: Tensor
) -> None:
    """The accepted tokens by position; the last token of the round is the next one's root."""
    row_B1 = buffers.sample_mapping[: len(chosen_BQ), None]
    i_Q = torch.arange(chosen_BQ.shape[1], device=chosen_BQ.device)
    is_kept_BQ = i_Q < accepted_B[:, None]
    position_BQ = state.num_computed_tokens[row_B1] + 1 + i_Q
    row_BQ = torch.where(is_kept_BQ, row_B1, -1)  # the rest goes to the scratch row
    history = state.sampling.history
    history[row_BQ, torch.where(is_kept_BQ, position_BQ, 0)] = chosen_BQ
