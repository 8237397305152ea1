"""The rows of draft trees, laid out in the static buffers: the counterpart of fill_round.

Row 0 of a slot is the request's last sampled token, at its own place in the request's blocks. The
rows after it are the nodes of its tree: row i has position num_computed + its depth, and a cache
slot behind the pool. Padding (token 0, position 0, cache slot -1) are batch slots without a
request, nodes deeper than the request's own number of drafts, and positions >= max_model_len; a
node that is padding has no children that are not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.proposal.tree import paths
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState
from specdec.stepping.tree_buffers import TreeBuffers


class Rows(NamedTuple):
    """Of B slots, N rows each: the root and the nodes in the state."""

    tokens_BN: Tensor
    parents_BN: Tensor  # the root's is itself
    depths_BN: Tensor


def fill_tree(buffers: StepBuffers, state: RequestState, num_reqs: int, max_model_len: int) -> None:
    """Gather the rows of each batch slot from the state by buffers.idx_mapping.

    num_reqs: batch slots, padding included; each has a row for every node, and one for the root
    """
    tree = buffers.tree
    assert tree is not None, "buffers of an engine that drafts chains"
    B = num_reqs
    row_B = buffers.idx_mapping[:B]  # -1 for padding, which reads the scratch row
    rows = _rows(state, row_B)
    T = rows.tokens_BN.numel()
    N = T // B
    row_B1 = row_B[:, None]
    first_B1 = state.num_computed_tokens[row_B1]
    position_BN = first_B1 + rows.depths_BN
    is_own_BN = (row_B1 >= 0) & (rows.depths_BN <= state.num_draft_tokens[row_B1])
    is_valid_BN = is_own_BN & (position_BN < max_model_len)
    root_slot_B1 = state.slots(position_BN[:, :1], row_B1, is_valid_BN[:, :1])
    slot_BN = torch.cat([root_slot_B1, tree.node_slots(B)], dim=1)
    first_row_B1 = torch.arange(0, T, N, device=row_B.device)[:, None]

    buffers.input_ids[:T] = torch.where(is_valid_BN, rows.tokens_BN, 0).view(T)
    buffers.positions[:T] = torch.where(is_valid_BN, position_BN, 0).view(T)
    buffers.slot_mapping[:T] = torch.where(is_valid_BN, slot_BN, -1).view(T)
    buffers.sample_states[:T] = torch.where(is_valid_BN, row_B1, -1).view(T)
    buffers.sample_starts[:T] = first_row_B1.expand(B, N).reshape(T)
    buffers.num_valid[:B] = is_valid_BN.sum(dim=1)
    buffers.sample_mapping[:B] = row_B
    tree.parents[:T] = rows.parents_BN.reshape(T)
    tree.path_starts[:B] = torch.where(row_B1 >= 0, first_B1, 0)[:, 0]
    _fill_paths(tree, rows, slot_BN, first_row_B1)


def _rows(state: RequestState, row_B: Tensor) -> Rows:
    """Of padding each row is a root."""
    tokens_BN = torch.cat([state.last_sampled_tokens[row_B, None], state.draft_tokens[row_B]], 1)
    root_B1 = torch.zeros_like(row_B)[:, None]
    is_real_B1 = row_B[:, None] >= 0
    nodes = state.draft_parents, state.draft_depths
    parents_BN, depths_BN = (
        torch.cat([root_B1, torch.where(is_real_B1, of_nodes[row_B], 0)], dim=1)
        for of_nodes in nodes
    )
    return Rows(tokens_BN, parents_BN, depths_BN)


def _fill_paths(tree: TreeBuffers, rows: Rows, slot_BN: Tensor, first_row_B1: Tensor) -> None:
    """slot_BN: where the keys of rows lie; those of nodes that are padding stay unread."""
    B, N = slot_BN.shape
    path_BND = paths(rows.parents_BN, rows.depths_BN, tree.shape.num_levels)
    on_path_BND = path_BND >= 0
    path_TD = torch.where(on_path_BND, path_BND + first_row_B1[..., None], -1).flatten(0, 1)
    # a slot without a request reads one key, whatever it holds: with none it would not be a number
    slot_BN = torch.where(slot_BN < 0, tree.first_slot, slot_BN)
    slot_BND = slot_BN.gather(1, path_BND.clamp(min=0).flatten(1)).view_as(path_BND)
    slot_BND = torch.where(on_path_BND, slot_BND, -1)
    tree.path_rows[: B * N] = path_TD
    tree.path_slots[: B * N] = slot_BND.flatten(0, 1)
