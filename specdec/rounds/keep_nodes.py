"""The nodes that are kept of all levels, of drafts wider than one: the best, in order.

A kept node's row comes after its parent's (rank.py). Nodes of levels that were not drafted, are
deeper than the request's own number of drafts, or lie past max_model_len are ranked after all
others: state.num_nodes counts those before them. In their places are token 0 and the root as
parent, and they are never verified.
"""

import torch

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.overlap import begin
from specdec.rounds.level import DraftLevel
from specdec.rounds.rank import ROOT, depths, kept_nodes, ranks

BLOCK, STEP = 128, 64  # nodes that are ranked at a time, and against how many
WARPS = 8  # measured on an H200


def launch_keep_nodes(num_reqs: int, to: DraftLevel) -> None:
    wide = to.buffers.candidates
    state = to.state
    proposed = to.buffers.proposed_tokens, to.buffers.proposed_parents
    kept = state.draft_tokens, state.draft_parents, state.draft_probs
    nodes = wide.rows, wide.tokens, wide.scores, wide.places
    slots = to.buffers.draft_levels, to.buffers.sample_mapping
    bounds = state.num_computed_tokens, state.num_draft_tokens
    sizes = len(state.num_computed_tokens) - 1, wide.scores.shape[1], to.max_model_len
    _keep_nodes_kernel[(num_reqs,)](
        *(*proposed, *kept, state.num_nodes, *nodes, *slots, *bounds, *sizes),
        X=wide.shape.nodes,
        K=to.width,
        BLOCK=BLOCK,
        STEP=STEP,
        num_warps=WARPS,
        **launch_options(wide.scores),
    )


@jit
def _keep_nodes_kernel(
    proposed_ptr,  # [B, X]
    proposed_parents_ptr,  # [B, X]
    kept_ptr,  # [R + 1, X] draft_tokens
    kept_parents_ptr,  # [R + 1, X]
    kept_probs_ptr,  # [R + 1, X] float32
    num_nodes_ptr,  # [R + 1]
    rows_ptr,  # [B, M] row of each node, 0 = it is not kept
    tokens_ptr,  # [B, M]
    scores_ptr,  # [B, M] float32
    places_ptr,  # [B, M] of parents, -1 = the root
    levels_ptr,  # [B] draft_levels
    sample_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1] num_draft_tokens
    R,
    M,
    max_model_len,
    X: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    idx = tl.load(sample_ptr + b)
    state = tl.where(idx < 0, R, idx)
    own = tl.minimum(tl.load(levels_ptr + b), tl.load(num_drafts_ptr + state))  # of padding, any
    deepest = tl.minimum(own, max_model_len - 1 - tl.load(num_computed_ptr + state))
    num_live = tl.where(deepest > 0, K + K * K * (deepest - 1), 0)
    num_live = tl.minimum(num_live, M).to(tl.int32)
    tl.store(num_nodes_ptr + state, tl.minimum(num_live, X).to(tl.int64))
    first = b * M
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + first + i, mask=i < num_live, other=float("-inf"))
        rank = ranks(score, i, scores_ptr + first, num_live, M, STEP)
        row = tl.where(rank < X, rank + 1, 0).to(tl.int64)
        tl.store(rows_ptr + first + i, row, mask=i < M)
    tl.debug_barrier()  # rows are read by others than those that wrote them
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + first + i, mask=i < M, other=0)
        is_kept = row > 0
        is_live = is_kept & (i < num_live)
        token = tl.load(tokens_ptr + first + i, mask=is_live, other=0)
        place = tl.load(places_ptr + first + i, mask=is_live, other=-1)
        score = tl.load(scores_ptr + first + i, mask=is_live, other=float("-inf"))
        parent = tl.load(rows_ptr + first + place, mask=is_live & (place >= 0), other=0)
        tl.store(proposed_ptr + b * X + row - 1, token, mask=is_kept)
        tl.store(proposed_parents_ptr + b * X + row - 1, parent, mask=is_kept)
        at = state * X + row - 1
        tl.store(kept_ptr + at, token, mask=is_kept)
        tl.store(kept_parents_ptr + at, parent, mask=is_kept)
        tl.store(kept_probs_ptr + at, tl.exp(score), mask=is_kept)


def keep_nodes_ref(num_reqs: int, to: DraftLevel) -> None:
    wide = to.buffers.candidates
    state = to.state
    B = num_reqs
    X = wide.shape.nodes
    row_B = to.buffers.sample_mapping[:B]
    room_B = to.max_model_len - 1 - state.num_computed_tokens[row_B]
    own_B = torch.minimum(to.buffers.draft_levels[:B], state.num_draft_tokens[row_B])
    place_M = torch.arange(wide.scores.shape[1], device=row_B.device)
    is_live_BM = depths(place_M, to.width) <= torch.minimum(own_B, room_B)[:, None]
    scores_BM = torch.where(is_live_BM, wide.scores[:B], -torch.inf)
    places_BM = torch.where(is_live_BM, wide.places[:B], ROOT)
    place_BX, parents_BX = kept_nodes(scores_BM, places_BM, X)
    is_live_BX = is_live_BM.gather(1, place_BX)
    tokens_BX = torch.where(is_live_BX, wide.tokens[:B].gather(1, place_BX), 0)
    to.buffers.proposed_tokens[:B] = tokens_BX
    to.buffers.proposed_parents[:B] = parents_BX
    # row -1, padding: the scratch row
    state.num_nodes[row_B] = is_live_BX.sum(dim=1)
    state.draft_tokens[row_B] = tokens_BX
    state.draft_parents[row_B] = parents_BX
    state.draft_probs[row_B] = scores_BM.gather(1, place_BX).exp()
