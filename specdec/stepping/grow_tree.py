"""One level of a draft tree per request, and after the last one the nodes that are kept.

Level j (0..D-1) has children of the root, or of the rows of the level before; their rows have
position num_computed + j, for nodes whose own position is one more. The first level comes from the
seed row of the draft's prefill, and all its nodes get rows; of every further level the best k do.
Rows beyond the context are padding (position 0, cache slot -1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.proposal.tree import ROOT, best, kept_nodes, log_shares
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState
from specdec.stepping.tree_buffers import TreeBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """Where the nodes of one level go. d2t_W: target ids of the draft's, None: the same."""

    buffers: StepBuffers
    state: RequestState
    level: int
    d2t_W: Tensor | None
    max_model_len: int

    @property
    def tree(self) -> TreeBuffers:
        assert self.buffers.tree is not None, "buffers of an engine that drafts chains"
        return self.buffers.tree

    @property
    def rows_per_req(self) -> int:
        """Of those that get children."""
        return self.tree.shape.top_k if self.level > 0 else 1

    @property
    def is_last(self) -> bool:
        return self.level + 1 == self.tree.shape.num_levels

    @property
    def first_place(self) -> int:
        """Of the level's nodes among all candidates."""
        k = self.tree.shape.top_k
        return k + k * k * (self.level - 1) if self.level > 0 else 0


def grow_tree(scores_XW: Tensor, hidden_XD: Tensor, to: TreeLevel) -> None:
    """Add the level's nodes; lay out the rows of the next level, or keep the best of all nodes.

    scores_XW: logits + temperature * noise of the rows, -inf where no draft may be
    hidden_XD: what their children's rows recycle
    """
    num_reqs = len(scores_XW) // to.rows_per_req
    _add_children(scores_XW, num_reqs, to)
    if to.is_last:
        _keep(num_reqs, to)
    else:
        _next_rows(hidden_XD, num_reqs, to)


def _add_children(scores_XW: Tensor, num_reqs: int, to: TreeLevel) -> None:
    tree = to.tree
    B = num_reqs
    k = tree.shape.top_k
    share_XW = log_shares(scores_XW)
    id_Xk = best(share_XW, k)
    path_B1 = torch.zeros_like(share_XW[:, :1])
    parent_X1 = torch.full_like(id_Xk[:, :1], ROOT)
    if to.level > 0:
        parent_X1 = tree.row_places[:B].reshape(-1, 1)
        path_B1 = tree.scores[:B].gather(1, tree.row_places[:B]).view(-1, 1)
    score_Xk = path_B1 + share_XW.gather(1, id_Xk)
    token_Xk = id_Xk if to.d2t_W is None else to.d2t_W[id_Xk]
    here = slice(to.first_place, to.first_place + to.rows_per_req * k)
    # a child without a probability is the last to be taken
    tree.scores[:B, here] = torch.where(score_Xk.isnan(), -torch.inf, score_Xk).view(B, -1)
    tree.tokens[:B, here] = token_Xk.view(B, -1)
    tree.places[:B, here] = parent_X1.expand_as(id_Xk).reshape(B, -1)


def _next_rows(hidden_XD: Tensor, num_reqs: int, to: TreeLevel) -> None:
    """The best nodes of the level get a row each."""
    tree = to.tree
    buffers = to.buffers
    state = to.state
    B = num_reqs
    k = tree.shape.top_k
    of_level_BM = tree.scores[:B, to.first_place :][:, : to.rows_per_req * k]
    chosen_Bk = best(of_level_BM, k)
    place_Bk = chosen_Bk + to.first_place
    # the row that each of them is a child of
    slot_B1 = torch.arange(B, device=place_Bk.device)[:, None]
    parent_X = (slot_B1 * to.rows_per_req + chosen_Bk // k).view(-1)
    tree.row_places[:B] = place_Bk
    buffers.draft_hidden[: B * k] = hidden_XD[parent_X]
    buffers.draft_last_tokens[: B * k] = tree.tokens[:B].gather(1, place_Bk).view(-1)
    row_B1 = buffers.sample_mapping[:B, None]
    position_Bk = (state.num_computed_tokens[row_B1] + to.level).expand_as(place_Bk)
    is_valid_Bk = (row_B1 >= 0) & (position_Bk < to.max_model_len)
    level_slot_Bk = tree.level_slots(B, to.level)
    buffers.draft_positions[: B * k] = torch.where(is_valid_Bk, position_Bk, 0).view(-1)
    buffers.draft_slots[: B * k] = torch.where(is_valid_Bk, level_slot_Bk, -1).view(-1)
    if to.level == 0:
        # padding reads one key, whatever it holds: with none it would not be a number
        tree.draft_path_slots[: B * k] = -1
        level_slot_Bk = torch.where(is_valid_Bk, level_slot_Bk, tree.first_slot)
        tree.draft_starts[:B] = torch.where(is_valid_Bk, position_Bk, 0)[:, 0]
    else:
        tree.draft_path_slots[: B * k] = tree.draft_path_slots[parent_X]
    tree.draft_path_slots[: B * k, to.level] = level_slot_Bk.view(-1)


def _keep(num_reqs: int, to: TreeLevel) -> None:
    tree = to.tree
    state = to.state
    B = num_reqs
    row_B = to.buffers.sample_mapping[:B]
    kept = kept_nodes(tree.tokens[:B], tree.scores[:B], tree.places[:B], tree.shape)
    to.buffers.draft_tokens[:B] = kept.tokens_BX
    tree.proposed_parents[:B] = kept.parents_BX
    # row -1, padding: the scratch row
    state.draft_tokens[row_B] = kept.tokens_BX
    state.draft_parents[row_B] = kept.parents_BX
    state.draft_depths[row_B] = kept.depths_BX
