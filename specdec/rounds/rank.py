"""The order of nodes by their scores, and which of them are kept, of drafts wider than one.

The score of a node is the logarithm of its path's probability: the draft's log softmax, summed from
the root on. Scores only fall along a path, and the earlier of equal nodes is the better one, so the
ancestors of every kept node are kept too. Row 0 of a request is the root, the last sampled token;
rows 1, 2, ... are the kept nodes, the best first: a parent's row comes before its children.

Nodes of levels that were not drafted, are deeper than the request's own number of drafts, or lie
past max_model_len are ranked after all others: state.num_nodes counts those before them. In their
places are token 0 and the root as parent, and they are never verified.

The operations have fixed shapes and never read the device from the host, so that graphs can capture
them. Letters: X rows, W draft vocabulary, M nodes of all levels.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.block_sums import powers_of, sum_over_ids
from specdec.kernels.cut_ids import CutIds, greatest_over_ids
from specdec.kernels.gumbel import log_ref
from specdec.kernels.overlap import begin
from specdec.rounds.level import DraftLevel

ROOT = -1  # as a parent among the nodes of all levels
LOW_BITS = 32
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


@jit
def ranks(score, i, scores_ptr, count, end, STEP: tl.constexpr):
    """Count the better ones among scores [end], of which those from `count` on are -inf.

    score: of node i, both in blocks; of equal ones the earlier is the better
    """
    rank = tl.zeros(score.shape, tl.int32)
    for start in range(0, end, STEP):
        o = start + tl.arange(0, STEP)
        other = tl.load(scores_ptr + o, mask=o < count, other=float("-inf"))
        is_better = other[None, :] > score[:, None]
        is_equal = other[None, :] == score[:, None]
        is_before = is_better | (is_equal & (o[None, :] < i[:, None]))
        rank += tl.sum((is_before & (o < end)[None, :]).to(tl.int32), axis=1)
    return rank


def best(scores_XM: Tensor, count: int) -> Tensor:
    """Find the places [X, count] of the greatest float32 scores, the first of equal ones first.

    NaN is less than every number.
    """
    return keys_of(scores_XM).topk(count, dim=-1).indices


def keys_of(scores_XM: Tensor) -> Tensor:
    """Make int64 of float32 scores, in their order, the first of equal ones the greatest.

    No two of a row are equal: the low 32 bits are 2^32 - 1 less the place. NaN is -inf.
    """
    scores_XM = torch.where(scores_XM.isnan(), -torch.inf, scores_XM + 0.0)  # -0.0 equals 0.0
    bits_XM = scores_XM.contiguous().view(torch.int32).long()
    ordered_XM = torch.where(bits_XM < 0, bits_XM ^ 0x7FFFFFFF, bits_XM)
    place_M = torch.arange(scores_XM.shape[-1], device=scores_XM.device)
    return (ordered_XM << LOW_BITS) + ((1 << LOW_BITS) - 1 - place_M)


def best_of_all(scores_XW: Tensor, count: int, cut: CutIds | None) -> tuple[Tensor, Tensor]:
    """Find the greatest scores of all ranks and their ids [X, count], in the order of `best`."""
    id_Xk = best(scores_XW, count)
    score_Xk = scores_XW.gather(1, id_Xk)
    if cut is None:
        return score_Xk, id_Xk
    pair_2Xk = torch.stack([score_Xk.double(), (id_Xk + cut.first).double()])
    of_ranks = cut.exchange.gather(pair_2Xk).permute(1, 2, 0, 3).flatten(2)
    score_XN, id_XN = of_ranks[0].float(), of_ranks[1].long()
    place_Xk = best(score_XN, count)
    return score_XN.gather(1, place_Xk), id_XN.gather(1, place_Xk)


def log_probs(scores_XW: Tensor, cut: CutIds | None = None) -> Tensor:
    """Log softmax in float32, at most 0; a row's result depends on nothing but the row."""
    top_X1 = greatest_over_ids(scores_XW, cut)
    behind_XW = scores_XW - top_X1
    return behind_XW - log_ref(sum_over_ids(powers_of(behind_XW), cut))


def perturbed(
    logits_XW: Tensor, floor_X: Tensor, temperature_X: Tensor, noise_BW: Tensor
) -> Tensor:
    """logits + temperature * noise, -inf where logits / temperature are below the floor.

    The rows of a batch slot have the same noise; greedy ones have temperature 0, and no floor.
    """
    scale_X1 = temperature_X[:, None]
    is_greedy_X1 = scale_X1 == 0
    scaled_XW = logits_XW / torch.where(is_greedy_X1, 1, scale_X1)
    noise_XW = noise_BW.repeat_interleave(len(logits_XW) // len(noise_BW), dim=0)
    noisy_XW = torch.where(is_greedy_X1, logits_XW, logits_XW + scale_X1 * noise_XW)
    is_out_XW = (scaled_XW < floor_X[:, None]) & ~is_greedy_X1
    return torch.where(is_out_XW, -torch.inf, noisy_XW)


def kept_nodes(scores_BM: Tensor, parents_BM: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Keep the best nodes: their places and the rows of their parents [B, X], 0 for the root.

    parents_BM: places of the parents, or ROOT
    """
    place_BX = best(scores_BM, num_nodes)
    row_X = torch.arange(1, num_nodes + 1, device=place_BX.device).expand_as(place_BX)
    # the last column stands for the root
    row_BM = torch.zeros_like(parents_BM[:, :1]).repeat(1, parents_BM.shape[1] + 1)
    row_BM.scatter_(1, place_BX, row_X)
    parents_BX = parents_BM.gather(1, place_BX)
    parents_BX = torch.where(parents_BX == ROOT, parents_BM.shape[1], parents_BX)
    return place_BX, row_BM.gather(1, parents_BX)


def depths(place_X: Tensor, width: int) -> Tensor:
    """Return the depth of nodes: the first level has `width` of them, each further one its square.

    place_X: among the nodes of all levels
    """
    later_X = (place_X - width).div(width**2, rounding_mode="floor") + 2
    return torch.where(place_X < width, 1, later_X)
