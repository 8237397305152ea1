"""One level of a draft tree per request, and after the last one the nodes that are kept.

Level j (0..D-1) has children of the root, or of the rows of the level before; their rows have
position num_computed + j, for nodes whose own position is one more. The first level comes from the
seed row of the draft's prefill, and all its nodes get rows; of every further level the best k do.
Rows beyond the context are padding (position 0, cache slot -1).

With a `threshold` drafts may stop before the last level (stop_drafting.py). Then fewer nodes are
kept: state.num_nodes counts them, and the places after them hold token 0, a child of the
root, and are never verified.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl
from specdec.kernels.best_children import (
    Perturbation,
    id_of,
    key_of,
    launch_best_children,
    no_child,
    score_of,
)
from specdec.kernels.choose_token import noise_ref
from specdec.kernels.overlap import begin, let_the_next_start, wait_for_inputs
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.rounds.stop_drafting import count_drafting, decide, decide_ref, drafting_ref
from specdec.rounds.tree import ROOT, best, depths, kept_nodes, log_probs, perturbed
from specdec.rounds.tree_buffers import TreeBuffers

KEEP_BLOCK, KEEP_STEP = 128, 64  # candidates that are ranked at a time, and against how many
RANKED = 64  # nodes of a level against which others are ranked at a time
LEVEL_WARPS, KEEP_WARPS = 4, 8  # measured on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """Where the nodes of one level go.

    d2t_W: target ids of the draft's, None: the draft has the target's ids
    threshold: [1] see stop_drafting.py; None: no slot stops
    num_levels: of the tree, at most as many as its buffers have room for
    """

    buffers: StepBuffers
    state: RequestState
    level: int
    num_levels: int
    d2t_W: Tensor | None
    max_model_len: int
    threshold: Tensor | None = None

    @property
    def tree(self) -> TreeBuffers:
        return self.buffers.of_trees

    @property
    def rows_per_req(self) -> int:
        """Count the rows of a request that get children."""
        return self.tree.shape.top_k if self.level > 0 else 1

    @property
    def is_last(self) -> bool:
        return self.level + 1 == self.num_levels

    @property
    def num_candidates(self) -> int:
        """Count the nodes of all levels of the tree."""
        shape = replace(self.tree.shape, num_levels=self.num_levels, smaller=())
        return shape.num_candidates

    @property
    def first_place(self) -> int:
        """Find the first of the level's nodes among all candidates."""
        k = self.tree.shape.top_k
        return k + k * k * (self.level - 1) if self.level > 0 else 0


def grow_tree(logits_XW: Tensor, to: TreeLevel, perturbation: Perturbation | None = None) -> None:
    """Add the level's nodes; lay out the rows of the next level, or keep the best of all nodes.

    logits_XW:    float32, of the rows that get children; from a launch after the level before
    perturbation: None where all requests are greedy; the rows of a request have the same noise
    """
    num_reqs = len(logits_XW) // to.rows_per_req
    add_children = pick(logits_XW, launch_add_children, add_children_ref)
    add_children(logits_XW, num_reqs, to, perturbation)
    if to.is_last:
        pick(logits_XW, launch_keep_nodes, keep_nodes_ref)(num_reqs, to)


def launch_add_children(
    logits_XW: Tensor, num_reqs: int, to: TreeLevel, perturbation: Perturbation | None
) -> None:
    """Reduce each tile of columns, then all of them; lay out the rows of the next level."""
    found = launch_best_children(logits_XW, to.tree.shape.top_k, perturbation)
    buffers = to.buffers
    tree = to.tree
    state = to.state
    tiles = found.peaks.shape[1]
    k = tree.shape.top_k
    P = to.rows_per_req
    nodes = tree.tokens, tree.scores, tree.places, tree.row_places, tree.parent_rows
    votes = buffers.draft_levels, buffers.num_going, buffers.votes
    rows = buffers.draft_last_tokens, buffers.draft_positions, buffers.draft_slots
    slots = buffers.sample_mapping, state.num_computed_tokens, state.num_draft_tokens
    sizes = tiles, tree.shape.num_candidates, len(state.num_computed_tokens) - 1, to.max_model_len
    _write_level_kernel[(num_reqs,)](
        *(*nodes, tree.draft_path_slots, tree.draft_starts, *votes, *rows, *found),
        found.ids if to.d2t_W is None else to.d2t_W,
        found.scores if to.threshold is None else to.threshold,
        *(*slots, *sizes, tree.first_slot, to.first_place, to.level),
        K=k,
        K_PADDED=next_power_of_2(k),
        P=P,
        P_PADDED=next_power_of_2(P),
        D=tree.shape.num_levels,
        D_PADDED=next_power_of_2(tree.shape.num_levels),
        IS_FIRST=to.level == 0,
        IS_LAST=to.is_last,
        HAS_D2T=to.d2t_W is not None,
        STOPS=to.threshold is not None,
        RANKED=RANKED,
        TILES=next_power_of_2(tiles),
        CHILDREN=next_power_of_2(tiles * k),
        num_warps=LEVEL_WARPS,
        **launch_options(found.scores),
    )


@jit(varying=("tiles", "first_place", "level"))
def _write_level_kernel(
    tokens_ptr,  # [B, M]
    scores_ptr,  # [B, M] float32
    places_ptr,  # [B, M]
    row_places_ptr,  # [B, K]
    parent_rows_ptr,  # [B x K]
    path_slots_ptr,  # [B x K, D]
    starts_ptr,  # [B]
    levels_ptr,  # [B] draft_levels, with STOPS
    num_going_ptr,  # [1] with STOPS
    votes_ptr,  # [1] with STOPS
    last_ptr,  # [B x K] draft_last_tokens
    positions_ptr,  # [B x K]
    slots_ptr,  # [B x K]
    tile_scores_ptr,  # [B x P, tiles, K] float32
    tile_ids_ptr,  # [B x P, tiles, K] int32
    peaks_ptr,  # [B x P, tiles] float32
    sums_ptr,  # [B x P, tiles] float32
    d2t_ptr,  # [W]
    threshold_ptr,  # [1] float32, with STOPS
    sample_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1] num_draft_tokens, with STOPS
    tiles,
    M,
    R,
    max_model_len,
    first_slot,
    first_place,
    level,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    P: tl.constexpr,
    P_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_D2T: tl.constexpr,
    STOPS: tl.constexpr,
    RANKED: tl.constexpr,
    TILES: tl.constexpr,
    CHILDREN: tl.constexpr,
    PDL: tl.constexpr,
):
    let_the_next_start(PDL)
    b = tl.program_id(0)
    p = tl.arange(0, P_PADDED)
    is_parent = p < P
    # before the wait what was written before the last product, see overlap.py
    idx = tl.load(sample_ptr + b, cache_modifier=".cg")
    row = tl.where(idx < 0, R, idx)
    position = tl.load(num_computed_ptr + row, cache_modifier=".cg") + level
    path = tl.zeros((P_PADDED,), tl.float32)
    parent_place = tl.zeros((P_PADDED,), tl.int64) - 1
    if not IS_FIRST:
        place_at = row_places_ptr + b * K + p
        parent_place = tl.load(place_at, mask=is_parent, other=0, cache_modifier=".cg")
        path_at = scores_ptr + b * M + parent_place
        path = tl.load(path_at, mask=is_parent, other=0.0, cache_modifier=".cg")
    wait_for_inputs(PDL)
    num_voters = tl.num_programs(0)
    if STOPS and not IS_FIRST:
        num_voters = count_drafting(num_going_ptr, num_drafts_ptr, threshold_ptr, level, idx, row)
        if num_voters == 0:
            return
    of_row = b * P + p
    tile = tl.arange(0, TILES)
    is_tile = is_parent[:, None] & (tile < tiles)[None, :]
    tile_at = of_row[:, None] * tiles + tile[None, :]
    peaks = tl.load(peaks_ptr + tile_at, mask=is_tile, other=float("-inf"))
    sums = tl.load(sums_ptr + tile_at, mask=is_tile, other=0.0)
    peak = tl.max(peaks, axis=1)
    subtracted = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(sums * tl.exp(peaks - subtracted[:, None]), axis=1)
    log_total = tl.log(tl.maximum(total, 1.0))  # as it is where a token has a probability

    child = tl.arange(0, CHILDREN)
    is_child = is_parent[:, None] & (child < tiles * K)[None, :]
    child_at = of_row[:, None] * tiles * K + child[None, :]
    score = tl.load(tile_scores_ptr + child_at, mask=is_child, other=float("-inf"))
    id = tl.load(tile_ids_ptr + child_at, mask=is_child, other=1 << 30)
    left = key_of(score, id)
    j = tl.arange(0, K_PADDED)
    best = tl.zeros((P_PADDED, K_PADDED), tl.int64) + no_child()
    for i in range(K):
        top = tl.max(left, axis=1)
        left = tl.where(left == top[:, None], no_child(), left)
        best = tl.where((j == i)[None, :], top[:, None], best)
    is_best = is_parent[:, None] & (j < K)[None, :]
    token = id_of(best).to(tl.int64)
    if HAS_D2T:
        token = tl.load(d2t_ptr + token, mask=is_best, other=0)
    value = path[:, None] + ((score_of(best) - subtracted[:, None]) - log_total[:, None])
    # a child without a probability is taken last
    value = tl.where(value == value, value, float("-inf"))
    at = b * M + first_place + p[:, None] * K + j[None, :]
    tl.store(tokens_ptr + at, token, mask=is_best)
    tl.store(scores_ptr + at, value, mask=is_best)
    tl.store(places_ptr + at, tl.broadcast_to(parent_place[:, None], best.shape), mask=is_best)
    if STOPS:
        tl.store(levels_ptr + b, tl.zeros((), tl.int64) + level + 1)
    if IS_LAST:
        return

    # Rank the level's nodes, each by how many are better, and keep the best K. Scores are read
    # back: computed twice, for two layouts, one may differ from itself in the last bit, and two
    # nodes would get the same rank.
    tl.debug_barrier()
    L: tl.constexpr = P_PADDED * K_PADDED
    flat = tl.arange(0, L)
    is_node = (flat // K_PADDED < P) & (flat % K_PADDED < K)
    level_at = scores_ptr + b * M + first_place
    node_at = b * M + first_place + flat // K_PADDED * K + flat % K_PADDED
    scores = tl.load(scores_ptr + node_at, mask=is_node, other=float("-inf"))
    tokens = tl.load(tokens_ptr + node_at, mask=is_node, other=0)
    rank = tl.zeros((L,), tl.int32)
    STEP: tl.constexpr = L if L < RANKED else RANKED
    for start in range(0, L, STEP):
        o = start + tl.arange(0, STEP)
        is_other = (o // K_PADDED < P) & (o % K_PADDED < K)
        other_at = level_at + o // K_PADDED * K + o % K_PADDED
        others = tl.load(other_at, mask=is_other, other=float("-inf"))
        is_better = others[None, :] > scores[:, None]
        is_equal = others[None, :] == scores[:, None]
        is_before = is_better | (is_equal & (o[None, :] < flat[:, None]))
        rank += tl.sum((is_before & is_other[None, :]).to(tl.int32), axis=1)
    is_next = is_node & (rank < K)
    if STOPS:
        prob = tl.exp(tl.max(scores, axis=0))
        decide(
            num_going_ptr,
            votes_ptr,
            num_drafts_ptr,
            threshold_ptr,
            num_voters,
            prob,
            level,
            idx,
            row,
        )
    is_valid = (idx >= 0) & (position < max_model_len)
    to = b * K + rank
    parent = flat // K_PADDED
    slot = first_slot + b * (K * (D - 1)) + level * K + rank
    tl.store(
        row_places_ptr + to, (first_place + parent * K + flat % K_PADDED).to(tl.int64), mask=is_next
    )
    tl.store(parent_rows_ptr + to, (b * P + parent).to(tl.int64), mask=is_next)
    tl.store(last_ptr + to, tokens, mask=is_next)
    zero = tl.zeros((L,), tl.int64)
    tl.store(positions_ptr + to, zero + tl.where(is_valid, position, 0), mask=is_next)
    tl.store(slots_ptr + to, tl.where(is_valid, slot, -1).to(tl.int64), mask=is_next)
    depth = tl.arange(0, D_PADDED)
    above = zero[:, None] + tl.zeros((1, D_PADDED), tl.int64) - 1
    if IS_FIRST:
        # padding reads one key, whatever it holds: with none it would get NaN
        slot = tl.where(is_valid, slot, first_slot)
        tl.store(starts_ptr + b, tl.where(is_valid, position, 0))
    else:
        above_at = (b * K + parent)[:, None] * D + depth[None, :]
        is_above = is_next[:, None] & (depth < level)[None, :]
        above = tl.load(path_slots_ptr + above_at, mask=is_above, other=-1)
        tl.debug_barrier()  # rows may take the place of their parents
    slots = tl.where((depth == level)[None, :], slot[:, None], above)
    slot_at = to[:, None] * D + depth[None, :]
    tl.store(path_slots_ptr + slot_at, slots, mask=is_next[:, None] & (depth < D)[None, :])


def launch_keep_nodes(num_reqs: int, to: TreeLevel) -> None:
    tree = to.tree
    state = to.state
    proposed = tree.proposed_nodes, tree.proposed_parents
    nodes = state.draft_tokens, state.draft_parents, state.draft_depths, state.draft_probs
    candidates = tree.rows, tree.tokens, tree.scores, tree.places
    slots = to.buffers.draft_levels, to.buffers.sample_mapping
    sizes = len(state.num_computed_tokens) - 1, tree.shape.num_candidates, to.num_candidates
    _keep_nodes_kernel[(num_reqs,)](
        *(*proposed, *nodes, state.num_nodes, *candidates, *slots, *sizes),
        N=tree.shape.num_rows,
        K=tree.shape.top_k,
        STOPS=to.threshold is not None,
        BLOCK=KEEP_BLOCK,
        STEP=KEEP_STEP,
        num_warps=KEEP_WARPS,
        **launch_options(tree.scores),
    )


@jit
def _keep_nodes_kernel(
    tokens_out_ptr,  # [B, N - 1]
    parents_out_ptr,  # [B, N - 1]
    state_tokens_ptr,  # [R + 1, N - 1]
    state_parents_ptr,  # [R + 1, N - 1]
    state_depths_ptr,  # [R + 1, N - 1]
    state_probs_ptr,  # [R + 1, N - 1] float32
    num_live_ptr,  # [R + 1], with STOPS
    rows_ptr,  # [B, M] row of each candidate, 0 = it is not kept
    tokens_ptr,  # [B, M]
    scores_ptr,  # [B, M] float32
    places_ptr,  # [B, M] of parents, -1 = the root
    levels_ptr,  # [B] draft_levels, with STOPS
    sample_ptr,  # [B]
    R,
    M,
    num_candidates,  # of the tree's levels; nodes of later levels are kept only after these
    N: tl.constexpr,
    K: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    first = b * M
    num_drafted = num_candidates
    if STOPS:
        levels = tl.load(levels_ptr + b).to(tl.int32)  # of padding, anything
        num_drafted = tl.minimum(K + K * K * tl.maximum(levels - 1, 0), num_candidates)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + first + i, mask=i < num_drafted, other=float("-inf"))
        rank = tl.zeros((BLOCK,), tl.int32)
        for begin_of_others in range(0, M, STEP):
            o = begin_of_others + tl.arange(0, STEP)
            other = tl.load(scores_ptr + first + o, mask=o < num_drafted, other=float("-inf"))
            is_better = other[None, :] > score[:, None]
            is_equal = other[None, :] == score[:, None]
            is_before = is_better | (is_equal & (o[None, :] < i[:, None]))
            rank += tl.sum((is_before & (o < M)[None, :]).to(tl.int32), axis=1)
        row = tl.where(rank < N - 1, rank + 1, 0).to(tl.int64)
        tl.store(rows_ptr + first + i, row, mask=i < M)
    tl.debug_barrier()  # rows are read by others than those that wrote them
    idx = tl.load(sample_ptr + b)
    state = tl.where(idx < 0, R, idx) * (N - 1)
    if STOPS:
        num_live = tl.minimum(num_drafted, N - 1).to(tl.int64)
        tl.store(num_live_ptr + tl.where(idx < 0, R, idx), num_live)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + first + i, mask=i < M, other=0)
        is_kept = row > 0
        is_node = is_kept
        is_first = i < K
        if STOPS:
            is_node = is_kept & (i < num_drafted)
            is_first = is_first | (i >= num_drafted)
        token = tl.load(tokens_ptr + first + i, mask=is_node, other=0)
        place = tl.load(places_ptr + first + i, mask=is_node, other=-1)
        parent = tl.load(rows_ptr + first + place, mask=is_node & (place >= 0), other=0)
        depth = tl.where(is_first, 1, (i - K) // (K * K) + 2).to(tl.int64)
        tl.store(tokens_out_ptr + b * (N - 1) + row - 1, token, mask=is_kept)
        tl.store(parents_out_ptr + b * (N - 1) + row - 1, parent, mask=is_kept)
        tl.store(state_tokens_ptr + state + row - 1, token, mask=is_kept)
        tl.store(state_parents_ptr + state + row - 1, parent, mask=is_kept)
        tl.store(state_depths_ptr + state + row - 1, depth, mask=is_kept)
        score = tl.load(scores_ptr + first + i, mask=is_node, other=float("-inf"))
        tl.store(state_probs_ptr + state + row - 1, tl.exp(score), mask=is_kept)


def add_children_ref(
    logits_XW: Tensor, num_reqs: int, to: TreeLevel, perturbation: Perturbation | None
) -> None:
    tree = to.tree
    B = num_reqs
    k = tree.shape.top_k
    scores_XW = logits_XW
    if perturbation is not None:
        keys = perturbation.noise_keys.every(to.rows_per_req)
        noise_BW = noise_ref(keys, logits_XW.shape[1])
        temperature_X = perturbation.noise_keys.temperatures
        scores_XW = perturbed(logits_XW, perturbation.floor_X, temperature_X, noise_BW)
    log_probs_XW = log_probs(scores_XW)
    id_Xk = best(log_probs_XW, k)
    path_X1 = torch.zeros_like(log_probs_XW[:, :1])
    parent_X1 = torch.full_like(id_Xk[:, :1], ROOT)
    if to.level > 0:
        parent_X1 = tree.row_places[:B].reshape(-1, 1)
        path_X1 = tree.scores[:B].gather(1, tree.row_places[:B]).view(-1, 1)
    score_Xk = path_X1 + log_probs_XW.gather(1, id_Xk)
    token_Xk = id_Xk if to.d2t_W is None else to.d2t_W[id_Xk]
    here = slice(to.first_place, to.first_place + to.rows_per_req * k)
    drafts_B = _drafts_ref(B, to)
    # a child without a probability is taken last
    score_Xk = torch.where(score_Xk.isnan(), -torch.inf, score_Xk)
    _replace(tree.scores[:B, here], score_Xk, drafts_B)
    _replace(tree.tokens[:B, here], token_Xk, drafts_B)
    _replace(tree.places[:B, here], parent_X1.expand_as(id_Xk), drafts_B)
    if not to.is_last:
        _next_rows_ref(num_reqs, to, drafts_B)


def _drafts_ref(num_reqs: int, to: TreeLevel) -> Tensor:
    levels_B = to.buffers.draft_levels[:num_reqs]
    drafts_B = torch.ones_like(levels_B, dtype=torch.bool)
    if to.threshold is None:
        return drafts_B
    if to.level > 0:
        level_B = torch.full_like(levels_B, to.level)
        drafts_B = drafting_ref(to.buffers, to.state, to.threshold, level_B)
    levels_B.masked_fill_(drafts_B, to.level + 1)
    return drafts_B


def _replace(rows: Tensor, values: Tensor, drafts_B: Tensor) -> None:
    """Replace the rows of slots that draft the level; the others keep what they have."""
    drafts = drafts_B.repeat_interleave(len(rows) // len(drafts_B))
    drafts = drafts.view(-1, *[1] * (rows.ndim - 1))
    rows.copy_(torch.where(drafts, values.reshape(rows.shape), rows))


def _next_rows_ref(num_reqs: int, to: TreeLevel, drafts_B: Tensor) -> None:
    """Give the best nodes of the level a row each."""
    tree = to.tree
    buffers = to.buffers
    B = num_reqs
    k = tree.shape.top_k
    X = B * k
    of_level_BM = tree.scores[:B, to.first_place :][:, : to.rows_per_req * k]
    chosen_Bk = best(of_level_BM, k)
    place_Bk = chosen_Bk + to.first_place
    slot_B1 = torch.arange(B, device=place_Bk.device)[:, None]
    parent_X = (slot_B1 * to.rows_per_req + chosen_Bk // k).view(-1)
    token_Bk = tree.tokens[:B].gather(1, place_Bk)
    row_B1 = buffers.sample_mapping[:B, None]
    position_Bk = (to.state.num_computed_tokens[row_B1] + to.level).expand_as(place_Bk)
    is_valid_Bk = (row_B1 >= 0) & (position_Bk < to.max_model_len)
    level_slot_Bk = tree.level_slots(B, to.level)
    _replace(tree.row_places[:B], place_Bk, drafts_B)
    _replace(tree.parent_rows[:X], parent_X, drafts_B)
    _replace(buffers.draft_last_tokens[:X], token_Bk, drafts_B)
    _replace(buffers.draft_positions[:X], torch.where(is_valid_Bk, position_Bk, 0), drafts_B)
    _replace(buffers.draft_slots[:X], torch.where(is_valid_Bk, level_slot_Bk, -1), drafts_B)
    if to.level == 0:
        # padding reads one key, whatever it holds: with none it would get NaN
        path_slots = torch.full_like(tree.draft_path_slots[:X], -1)
        level_slot_Bk = torch.where(is_valid_Bk, level_slot_Bk, tree.first_slot)
        tree.draft_starts[:B] = torch.where(is_valid_Bk, position_Bk, 0)[:, 0]
    else:
        path_slots = tree.draft_path_slots[parent_X]
    path_slots[:, to.level] = level_slot_Bk.view(-1)
    _replace(tree.draft_path_slots[:X], path_slots, drafts_B)
    if to.threshold is not None:
        prob_B = of_level_BM.amax(dim=1).exp()
        level_B = torch.full_like(slot_B1[:, 0], to.level)
        decide_ref(buffers, to.state, to.threshold, prob_B, level_B, drafts_B)


def keep_nodes_ref(num_reqs: int, to: TreeLevel) -> None:
    tree = to.tree
    state = to.state
    B = num_reqs
    X = tree.shape.num_nodes
    row_B = to.buffers.sample_mapping[:B]
    tokens_BM, scores_BM, places_BM = tree.tokens[:B], tree.scores[:B], tree.places[:B]
    live_B1 = torch.full_like(row_B, X)[:, None]
    place_M = torch.arange(tree.shape.num_candidates, device=row_B.device)
    scores_BM = torch.where(place_M < to.num_candidates, scores_BM, -torch.inf)
    if to.threshold is not None:
        is_drafted_BM = depths(place_M, tree.shape.top_k) <= to.buffers.draft_levels[:B, None]
        is_node_BM = is_drafted_BM & (place_M < to.num_candidates)
        tokens_BM = torch.where(is_node_BM, tokens_BM, 0)
        scores_BM = torch.where(is_node_BM, scores_BM, -torch.inf)
        places_BM = torch.where(is_node_BM, places_BM, ROOT)
        live_B1 = is_node_BM.sum(dim=1, keepdim=True).clamp(max=X)
        state.num_nodes[row_B] = live_B1[:, 0]
    kept = kept_nodes(tokens_BM, scores_BM, places_BM, tree.shape)
    is_live_BX = torch.arange(X, device=row_B.device) < live_B1
    depths_BX = torch.where(is_live_BX, kept.depths_BX, 1)
    tree.proposed_nodes[:B] = kept.tokens_BX
    tree.proposed_parents[:B] = kept.parents_BX
    # row -1, padding: the scratch row
    state.draft_tokens[row_B] = kept.tokens_BX
    state.draft_parents[row_B] = kept.parents_BX
    state.draft_depths[row_B] = depths_BX
    state.draft_probs[row_B] = kept.scores_BX.exp()
