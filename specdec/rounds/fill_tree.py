"""The rows of draft trees, laid out in the static buffers: the counterpart of fill_round.

Row 0 of a slot is the request's last sampled token, at its own place in the request's blocks. The
rows after it are the nodes of its tree: row i has position num_computed + its depth, and a cache
slot after the pool. A row is padding (token 0, position 0, cache slot -1) if its slot is empty, its
node is deeper than the request allows, was never drafted (state.num_nodes), or lies past
max_model_len; all descendants of such a node are padding, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.rounds.tree import paths
from specdec.rounds.tree_buffers import TreeBuffers
from specdec.sizes import BLOCK_SIZE


def fill_tree(
    buffers: StepBuffers, state: RequestState, num_reqs: int, num_rows: int, max_model_len: int
) -> None:
    """Gather the rows of each batch slot from the state by buffers.idx_mapping.

    num_reqs: batch slots, padding included
    num_rows: N, of each slot: the root's and those of nodes, all or the most probable
    """
    if not use_triton(buffers.idx_mapping):
        fill_tree_ref(buffers, state, num_reqs, num_rows, max_model_len)
        return
    tree = buffers.of_trees
    rows = buffers.input_ids, buffers.positions, buffers.slot_mapping, buffers.num_valid
    decided = buffers.sample_mapping, buffers.sample_states, buffers.sample_starts
    of_paths = tree.parents, tree.path_rows, tree.path_slots, tree.path_starts
    roots = buffers.idx_mapping, state.last_sampled_tokens
    nodes = state.draft_tokens, state.draft_parents, state.draft_depths
    bounds = state.num_computed_tokens, state.num_draft_tokens, state.num_nodes
    R, M = state.block_table.shape
    sizes = R - 1, M, max_model_len, tree.first_slot
    _fill_tree_kernel[(num_reqs,)](
        *(*rows, *decided, *of_paths, *roots, *nodes, *bounds, state.block_table, *sizes),
        N=num_rows,
        N_PADDED=next_power_of_2(num_rows),
        X=tree.shape.num_nodes,
        D1=tree.shape.path_len,
        S=BLOCK_SIZE,
        MAY_STOP=state.may_stop,
        num_warps=1,
        **launch_options(buffers.idx_mapping),
    )


@jit
def _fill_tree_kernel(
    input_ids_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    num_valid_ptr,  # [B]
    sample_ptr,  # [B]
    states_ptr,  # [T] sample_states
    first_rows_ptr,  # [T] sample_starts
    row_parents_ptr,  # [T] tree.parents
    path_rows_ptr,  # [T, D1]
    path_slots_ptr,  # [T, D1]
    path_starts_ptr,  # [B]
    idx_ptr,  # [B]
    last_sampled_ptr,  # [R + 1]
    drafts_ptr,  # [R + 1, X]
    parents_ptr,  # [R + 1, X]
    depths_ptr,  # [R + 1, X]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1], with MAY_STOP
    block_table_ptr,  # [R + 1, M]
    R,
    M,
    max_model_len,
    first_slot,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    X: tl.constexpr,
    D1: tl.constexpr,
    S: tl.constexpr,
    MAY_STOP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, N_PADDED)
    inside = i < N
    idx = tl.load(idx_ptr + b)
    is_real = idx >= 0
    row = tl.where(is_real, idx, R)
    nodes = row * X - 1  # of row 1, less 1
    is_node = inside & (i > 0) & is_real
    depth = tl.load(depths_ptr + nodes + i, mask=is_node, other=0)
    parent = tl.load(parents_ptr + nodes + i, mask=is_node, other=0)
    draft = tl.load(drafts_ptr + nodes + i, mask=is_node, other=0)
    token = tl.where(i == 0, tl.load(last_sampled_ptr + row), draft)
    first = tl.load(num_computed_ptr + row)
    position = first + depth
    is_own = is_real & (depth <= tl.load(num_drafts_ptr + row))
    if MAY_STOP:
        is_own = is_own & (i <= tl.load(num_live_ptr + row))
    is_valid = inside & is_own & (position < max_model_len)
    has_root = is_real & (first < max_model_len)
    block = tl.load(block_table_ptr + row * M + first // S, mask=has_root, other=0)
    root_slot = block * S + first % S
    node_slots = first_slot + b * X - 1
    slot = tl.where(i == 0, root_slot, node_slots + i)
    at = b * N + i
    tl.store(input_ids_ptr + at, tl.where(is_valid, token, 0), mask=inside)
    tl.store(positions_ptr + at, tl.where(is_valid, position, 0), mask=inside)
    tl.store(slots_ptr + at, tl.where(is_valid, slot, -1), mask=inside)
    tl.store(states_ptr + at, tl.where(is_valid, idx, -1), mask=inside)
    tl.store(first_rows_ptr + at, tl.zeros_like(depth) + b * N, mask=inside)
    tl.store(row_parents_ptr + at, parent, mask=inside)
    tl.store(num_valid_ptr + b, tl.sum(is_valid.to(tl.int64), axis=0))
    tl.store(sample_ptr + b, idx)
    tl.store(path_starts_ptr + b, tl.where(has_root, first, 0))
    # a slot without a request reads one key, whatever it holds: with none it would get NaN
    path_root = tl.where(has_root, root_slot, first_slot)
    here = at * D1
    nothing = tl.zeros_like(depth) - 1
    for j in range(D1):
        is_behind = inside & (j > depth)
        tl.store(path_rows_ptr + here + j, nothing, mask=is_behind)
        tl.store(path_slots_ptr + here + j, nothing, mask=is_behind)
    current = i.to(tl.int64)
    for _ in range(D1):
        is_above = inside & (current > 0) & is_real
        level = tl.load(depths_ptr + nodes + current, mask=is_above, other=0)
        is_inner = (current > 0) & is_real
        path_slot = tl.where(is_inner, node_slots + current, path_root)
        path_row = tl.where(is_inner, current, 0) + b * N
        tl.store(path_rows_ptr + here + level, path_row, mask=inside)
        tl.store(path_slots_ptr + here + level, path_slot, mask=inside)
        current = tl.load(parents_ptr + nodes + current, mask=is_above, other=0)


class Rows(NamedTuple):
    """The rows of B slots, N each: the root and the nodes in the state."""

    tokens_BN: Tensor
    parents_BN: Tensor  # the root's is itself
    depths_BN: Tensor


def fill_tree_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, num_rows: int, max_model_len: int
) -> None:
    tree = buffers.of_trees
    B = num_reqs
    row_B = buffers.idx_mapping[:B]  # -1 for padding, which reads the scratch row
    N = num_rows
    rows = _rows(state, row_B, N - 1)
    T = B * N
    row_B1 = row_B[:, None]
    first_B1 = state.num_computed_tokens[row_B1]
    position_BN = first_B1 + rows.depths_BN
    is_own_BN = (row_B1 >= 0) & (rows.depths_BN <= state.num_draft_tokens[row_B1])
    if state.may_stop:
        i_N = torch.arange(N, device=row_B.device)
        is_own_BN = is_own_BN & (i_N <= state.num_nodes[row_B1])
    is_valid_BN = is_own_BN & (position_BN < max_model_len)
    root_slot_B1 = state.slots(position_BN[:, :1], row_B1, is_valid_BN[:, :1])
    slot_BN = torch.cat([root_slot_B1, tree.node_slots(B)[:, : N - 1]], dim=1)
    first_row_B1 = torch.arange(0, T, N, device=row_B.device)[:, None]

    buffers.input_ids[:T] = torch.where(is_valid_BN, rows.tokens_BN, 0).view(T)
    buffers.positions[:T] = torch.where(is_valid_BN, position_BN, 0).view(T)
    buffers.slot_mapping[:T] = torch.where(is_valid_BN, slot_BN, -1).view(T)
    buffers.sample_states[:T] = torch.where(is_valid_BN, row_B1, -1).view(T)
    buffers.sample_starts[:T] = first_row_B1.expand(B, N).reshape(T)
    buffers.num_valid[:B] = is_valid_BN.sum(dim=1)
    buffers.sample_mapping[:B] = row_B
    tree.parents[:T] = rows.parents_BN.reshape(T)
    tree.path_starts[:B] = torch.where(is_valid_BN[:, :1], first_B1, 0)[:, 0]
    _fill_paths(tree, rows, slot_BN, first_row_B1)


def _rows(state: RequestState, row_B: Tensor, num_nodes: int) -> Rows:
    """Read the rows of the state; in an empty slot each row is a root."""
    drafts_BX = state.draft_tokens[row_B, :num_nodes]
    tokens_BN = torch.cat([state.last_sampled_tokens[row_B, None], drafts_BX], 1)
    root_B1 = torch.zeros_like(row_B)[:, None]
    is_real_B1 = row_B[:, None] >= 0
    nodes = state.draft_parents, state.draft_depths
    parents_BN, depths_BN = (
        torch.cat([root_B1, torch.where(is_real_B1, of_nodes[row_B, :num_nodes], 0)], dim=1)
        for of_nodes in nodes
    )
    return Rows(tokens_BN, parents_BN, depths_BN)


def _fill_paths(tree: TreeBuffers, rows: Rows, slot_BN: Tensor, first_row_B1: Tensor) -> None:
    """slot_BN: where the keys of rows lie; keys of padded nodes stay unread."""
    B, N = slot_BN.shape
    path_BND = paths(rows.parents_BN, rows.depths_BN, tree.shape.max_depth)
    on_path_BND = path_BND >= 0
    path_TD = torch.where(on_path_BND, path_BND + first_row_B1[..., None], -1).flatten(0, 1)
    # a slot without a request reads one key, whatever it holds: with none it would get NaN
    slot_BN = torch.where(slot_BN < 0, tree.first_slot, slot_BN)
    slot_BND = slot_BN.gather(1, path_BND.clamp(min=0).flatten(1)).view_as(path_BND)
    slot_BND = torch.where(on_path_BND, slot_BND, -1)
    tree.path_rows[: B * N] = path_TD
    tree.path_slots[: B * N] = slot_BND.flatten(0, 1)
