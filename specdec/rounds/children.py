"""A level of drafts wider than one: the k best children of each row, and the rows of the next.

All levels' nodes lie in one list per request (tokens, scores, places of their parents), level after
level: k children of the seed's row, which all get rows; then k children of each of k rows, of which
the best k get rows. A row's key lies in a scratch slot, since siblings share a position; it sees
the committed context and its own ancestors. rank.py chooses among all nodes afterwards.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl
from specdec.kernels.best_children import (
    Perturbation,
    id_of,
    key_of,
    launch_best_children,
    no_child,
    score_of,
)
from specdec.kernels.choose_token import noise_ref
from specdec.kernels.cut_ids import first_id
from specdec.kernels.overlap import let_the_next_start, wait_for_inputs
from specdec.rounds.level import DraftLevel, count_drafting, decide, decide_ref, replace
from specdec.rounds.rank import ROOT, best, best_of_all, log_probs, perturbed, ranks

RANKED = 64  # nodes of a level against which others are ranked at a time
WARPS = 4  # measured on an H200


def launch_children(logits_XW: Tensor, to: DraftLevel, noise: Perturbation | None) -> None:
    """Reduce each tile of columns, then all of them; lay out the rows of the next level.

    logits_XW: float32, of the rows that get children; from a launch after the level before
    noise: None where all requests are greedy; the rows of a request have the same noise
    """
    k = to.width
    P = to.rows_per_req
    found = launch_best_children(logits_XW, k, noise, to.cut)
    buffers = to.buffers
    wide = buffers.candidates
    state = to.state
    tiles = found.peaks.shape[1]
    nodes = wide.tokens, wide.scores, wide.places, wide.row_places, wide.parent_rows
    votes = buffers.draft_levels, buffers.num_going, buffers.votes
    rows = buffers.draft_last_tokens, buffers.draft_positions, buffers.draft_slots
    slots = buffers.sample_mapping, state.num_computed_tokens, state.num_draft_tokens
    sizes = tiles, wide.scores.shape[1], len(state.num_computed_tokens) - 1, to.max_model_len
    D = wide.path_slots.shape[1]
    _write_children_kernel[(len(logits_XW) // P,)](
        *(*nodes, wide.path_slots, wide.starts, *votes, *rows, *found),
        found.ids if to.d2t_W is None else to.d2t_W,
        found.scores if to.threshold is None else to.threshold,
        *(*slots, *sizes, wide.first_slot, to.first_place, to.level),
        K=k,
        K_PADDED=next_power_of_2(k),
        P=P,
        P_PADDED=next_power_of_2(P),
        D=D,
        D_PADDED=next_power_of_2(D),
        IS_FIRST=to.level == 0,
        IS_LAST=to.is_last,
        HAS_D2T=to.d2t_W is not None,
        STOPS=to.threshold is not None,
        NODES=next_power_of_2(P * k),
        STEP=min(RANKED, next_power_of_2(P * k)),
        TILES=next_power_of_2(tiles),
        CHILDREN=next_power_of_2(tiles * k),
        num_warps=WARPS,
        **launch_options(found.scores),
    )


@jit(varying=("tiles", "first_place", "level"))
def _write_children_kernel(
    tokens_ptr,  # [B, M]
    scores_ptr,  # [B, M] float32
    places_ptr,  # [B, M]
    row_places_ptr,  # [B, K]
    parent_rows_ptr,  # [B x K]
    path_slots_ptr,  # [B x K, D]
    starts_ptr,  # [B]
    levels_ptr,  # [B] draft_levels
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
    NODES: tl.constexpr,
    STEP: tl.constexpr,
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
    stop = (num_going_ptr, votes_ptr, num_drafts_ptr, threshold_ptr)
    num_voters = tl.num_programs(0)
    if STOPS and not IS_FIRST:
        num_voters = count_drafting(stop, level, idx, row)
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
    for nth in range(K):
        top = tl.max(left, axis=1)
        left = tl.where(left == top[:, None], no_child(), left)
        best = tl.where((j == nth)[None, :], top[:, None], best)
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
    tl.store(levels_ptr + b, tl.zeros((), tl.int64) + level + 1)
    if IS_LAST:
        return

    # The best K of the level get rows. Scores are read back: computed twice, for two layouts, one
    # may differ from itself in the last bit, and two nodes would get the same rank.
    tl.debug_barrier()
    i = tl.arange(0, NODES)
    at = b * M + first_place
    scores = tl.load(scores_ptr + at + i, mask=i < P * K, other=float("-inf"))
    tokens = tl.load(tokens_ptr + at + i, mask=i < P * K, other=0)
    rank = ranks(scores, i, scores_ptr + at, P * K, P * K, STEP)
    is_next = (i < P * K) & (rank < K)
    if STOPS:
        decide(stop, num_voters, tl.exp(tl.max(scores, axis=0)), level, idx, row)
    is_valid = (idx >= 0) & (position < max_model_len)
    to = b * K + rank
    parent = i // K
    slot = first_slot + b * (K * (D - 1)) + level * K + rank
    tl.store(row_places_ptr + to, (first_place + i).to(tl.int64), mask=is_next)
    tl.store(parent_rows_ptr + to, (b * P + parent).to(tl.int64), mask=is_next)
    tl.store(last_ptr + to, tokens, mask=is_next)
    zero = tl.zeros((NODES,), tl.int64)
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


def add_children_ref(
    logits_XW: Tensor, to: DraftLevel, noise: Perturbation | None, drafts_B: Tensor
) -> None:
    """Add the level's nodes to the list of all."""
    wide = to.buffers.candidates
    B, k = len(drafts_B), to.width
    scores_XW = logits_XW
    if noise is not None:
        floor_X, keys = noise
        of_slots = keys.every(to.rows_per_req)
        noise_BW = noise_ref(of_slots, logits_XW.shape[1], first_id(to.cut))
        scores_XW = perturbed(logits_XW, floor_X, keys.temperatures, noise_BW)
    log_prob_Xk, id_Xk = best_of_all(log_probs(scores_XW, to.cut), k, to.cut)
    path_X1 = torch.zeros_like(log_prob_Xk[:, :1])
    parent_X1 = torch.full_like(id_Xk[:, :1], ROOT)
    if to.level != 0:
        parent_X1 = wide.row_places[:B].reshape(-1, 1)
        path_X1 = wide.scores[:B].gather(1, wide.row_places[:B]).view(-1, 1)
    score_Xk = path_X1 + log_prob_Xk
    here = slice(to.first_place, to.first_place + to.rows_per_req * k)
    # a child without a probability is taken last
    score_Xk = torch.where(score_Xk.isnan(), -torch.inf, score_Xk)
    replace(wide.scores[:B, here], score_Xk, drafts_B)
    replace(wide.tokens[:B, here], id_Xk if to.d2t_W is None else to.d2t_W[id_Xk], drafts_B)
    replace(wide.places[:B, here], parent_X1.expand_as(id_Xk), drafts_B)


def rank_children_ref(
    to: DraftLevel, position_B1: Tensor, is_valid_B1: Tensor, drafts_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Give the best nodes of the level a row each; return the rows' tokens and slots [B, k].

    position_B1: of the rows, 0 where they are not valid
    """
    level = to.level or 0
    wide = to.buffers.candidates
    B, k = len(drafts_B), to.width
    X = B * k
    of_level_BM = wide.scores[:B, to.first_place :][:, : to.rows_per_req * k]
    chosen_Bk = best(of_level_BM, k)
    place_Bk = chosen_Bk + to.first_place
    slot_B1 = torch.arange(B, device=place_Bk.device)[:, None]
    parent_X = (slot_B1 * to.rows_per_req + chosen_Bk // k).view(-1)
    level_slot_Bk = wide.level_slots(B, level)
    if level == 0:
        # padding reads one key, whatever it holds: with none it would get NaN
        path_slots = torch.full_like(wide.path_slots[:X], -1)
        path_slots[:, 0] = torch.where(is_valid_B1, level_slot_Bk, wide.first_slot).view(-1)
        wide.starts[:B] = position_B1[:, 0]
    else:
        path_slots = wide.path_slots[parent_X]
        path_slots[:, level] = level_slot_Bk.view(-1)
    replace(wide.row_places[:B], place_Bk, drafts_B)
    replace(wide.parent_rows[:X], parent_X, drafts_B)
    replace(wide.path_slots[:X], path_slots, drafts_B)
    decide_ref(
        to,
        of_level_BM.amax(dim=1).exp(),
        torch.full_like(drafts_B, level, dtype=torch.int64),
        drafts_B,
    )
    return wide.tokens[:B].gather(1, place_Bk), torch.where(is_valid_B1, level_slot_Bk, -1)
