"""A level of drafts: the best tokens by the draft's logits, as the target's ids.

A draft is a guess: where its logits leave no choice it is the head's token 0, never a marker. With
noise g, which is the target's own unless p/q accepts, tokens are the best of
logits / temperature + g, so that they agree with what the target draws (choose_token.py; where
there are several, logits + temperature * g, best_children.py).

Two kernels stand behind the one entry, since a node of width 1 needs none of the ranking: here it
is the best over tiles of the head, and goes to the state rows at once; greedy drafts never write
their logits. Wider levels are in children.py. One torch twin covers both.

Nodes of width 1 have a probability if `calibration` is given: the product over their path of the
draft's own probability, whose odds are multiplied by a factor. For a greedy draft that is its
softmax probability; for one drawn with noise g, that of the softmax of logits + temperature * g.
If the draft has a confidence of its own in the level's drafts, both count alike: as the square root
of their product.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.best_children import Perturbation
from specdec.kernels.best_token import (
    TileMaxima,
    confidence,
    confidence_ref,
    head_tiles,
    id_or_marker_ref,
    join_tiles,
    launch_tile_maxima,
    lowest_best,
)
from specdec.kernels.choose_token import launch_choices, noisy_ref
from specdec.kernels.cut_ids import tile_columns_of
from specdec.kernels.linear import linear
from specdec.kernels.overlap import begin
from specdec.rounds.children import add_children_ref, launch_children, rank_children_ref
from specdec.rounds.level import (
    DraftLevel,
    count_drafting,
    decide,
    decide_ref,
    drafting_ref,
    replace,
)
from specdec.rounds.rank import keep_nodes_ref, launch_keep_nodes
from specdec.sizes import BLOCK_SIZE

# clamps the draft's probabilities to here and 1 - this
LEAST_CONFIDENCE = 1e-4

# makes the floors and the noise of rows from their logits
Draw = Callable[[Tensor], Perturbation]


def propose_level(
    normed_XD: Tensor,
    weight_WD: Tensor,
    to: DraftLevel,
    draw: Draw | None = None,
    factor: float = 1.0,
) -> None:
    """Write the level's nodes and lay out the rows of the next level; after the last, rank nodes.

    normed_XD: what the head reads, of the rows that get children
    weight_WD: the head
    draw: None where all requests are greedy
    factor: of logits
    """
    if draw is None and to.width == 1 and use_triton(normed_XD):
        has_sums = to.calibration is not None
        tiles = head_tiles(normed_XD, weight_WD, to.cut)
        head = normed_XD, weight_WD, None, has_sums, tiles, factor, to.cut
        launch_write_nodes(join_tiles(launch_tile_maxima(*head), to.cut, tiles.block_n), to)
        return
    logits_XW = linear(normed_XD, weight_WD, out_dtype=torch.float32)
    if factor != 1.0:
        logits_XW.mul_(factor)
    write_level(logits_XW, to, None if draw is None else draw(logits_XW))


def propose_levels(
    normed_KBD: Tensor,
    weight_WD: Tensor,
    levels: Sequence[DraftLevel],
    draw: Callable[[DraftLevel, Tensor], Perturbation] | None = None,
    factor: float = 1.0,
) -> None:
    """Write levels of width 1 that depend on no other, by one product of the head.

    normed_KBD: what the head reads, by level
    draw: makes the noise of a level; None where all requests are greedy
    factor: of logits
    """
    K, B, _ = normed_KBD.shape
    assert len(levels) == K, (len(levels), K)
    head = normed_KBD.flatten(0, 1), weight_WD
    if draw is None and use_triton(normed_KBD):
        has_sums = levels[0].calibration is not None
        maxima = launch_tile_maxima(*head, has_sums=has_sums, factor=factor)
        for i, to in enumerate(levels):
            here = slice(i * B, (i + 1) * B)
            launch_write_nodes(TileMaxima(*(x[:, here] for x in maxima if x is not None)), to)
        return
    logits_XW = linear(*head, out_dtype=torch.float32)
    if factor != 1.0:
        logits_XW.mul_(factor)
    for logits_BW, to in zip(logits_XW.view(K, B, -1), levels, strict=True):
        write_level(logits_BW, to, None if draw is None else draw(to, logits_BW))


def write_level(logits_XW: Tensor, to: DraftLevel, noise: Perturbation | None) -> None:
    """Write the level from its logits, as `propose_level` does."""
    if not use_triton(logits_XW):
        write_level_ref(logits_XW, to, noise)
    elif to.width > 1:
        launch_children(logits_XW, to, noise)
        if to.is_last:
            launch_keep_nodes(len(logits_XW) // to.rows_per_req, to)
    else:
        assert noise is not None, "the tiles of the head need no logits"
        has_sums, columns = to.calibration is not None, tile_columns_of(logits_XW, to.cut)
        choices = join_tiles(launch_choices(logits_XW, *noise, has_sums, to.cut), to.cut, columns)
        launch_write_nodes(choices, to, noise.noise_keys.temperatures)


def launch_write_nodes(
    maxima: TileMaxima, to: DraftLevel, temperature_B: Tensor | None = None
) -> None:
    """Reduce the maxima of tiles to tokens, and write what follows from them."""
    buffers = to.buffers
    state = to.state
    best, ids, sums = maxima
    tiles, B = best.shape
    is_scaled = temperature_B is not None
    if temperature_B is None:
        temperature_B = to.temperature_B
    rows = buffers.draft_last_tokens, buffers.draft_positions, buffers.draft_slots
    votes = buffers.num_going, buffers.votes
    nodes = state.draft_tokens, state.num_nodes, state.draft_probs
    slots = buffers.sample_mapping, state.num_computed_tokens, state.num_draft_tokens
    R, M = state.block_table.shape
    _write_nodes_kernel[(B,)](
        *(buffers.proposed_tokens, buffers.draft_levels, *rows, *votes, *nodes, best, ids),
        best if sums is None else sums,
        best if temperature_B is None else temperature_B,
        best if to.calibration is None else to.calibration,
        best if to.confidence_B is None else to.confidence_B,
        best if to.threshold is None else to.threshold,
        ids if to.d2t_W is None else to.d2t_W,
        *(*slots, state.block_table, tiles, best.stride(0), R - 1, state.draft_tokens.shape[1], M),
        *(to.max_model_len, -1 if to.level is None else to.level),
        K=to.shape.levels,
        IS_FIRST=to.level == 0,
        HAS_PROBS=to.calibration is not None,
        HAS_CONFIDENCE=to.confidence_B is not None,
        STOPS=to.threshold is not None,
        IS_SAMPLED=temperature_B is not None,
        IS_SCALED=is_scaled,
        HAS_D2T=to.d2t_W is not None,
        LEAST=LEAST_CONFIDENCE,
        S=BLOCK_SIZE,
        BLOCK=next_power_of_2(tiles),
        num_warps=4,
        **launch_options(best),
    )


@jit(varying=("temperatures_ptr", "tiles", "num_rows", "given_level"))
def _write_nodes_kernel(
    proposed_ptr,  # [B, X] tokens
    levels_ptr,  # [B] draft_levels
    last_ptr,  # [B]
    positions_ptr,  # [B]
    slots_ptr,  # [B]
    num_going_ptr,  # [1] with STOPS
    votes_ptr,  # [1] with STOPS
    tokens_ptr,  # [R + 1, X]
    num_nodes_ptr,  # [R + 1]
    probs_ptr,  # [R + 1, X] float32, with HAS_PROBS
    best_ptr,  # [tiles, num_rows], the first B
    ids_ptr,  # [tiles, num_rows]
    sums_ptr,  # [tiles, num_rows] float32, with HAS_PROBS
    temperatures_ptr,  # [B] float32, with IS_SAMPLED
    calibration_ptr,  # [2, K] float32, with HAS_PROBS
    confidence_ptr,  # [B] float32, with HAS_CONFIDENCE
    threshold_ptr,  # [1] float32, with STOPS
    d2t_ptr,  # [W]
    sample_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1] num_draft_tokens
    block_table_ptr,  # [R + 1, M]
    tiles,
    num_rows,  # of maxima: of this level alone, or of several
    R,
    X,
    M,
    max_model_len,
    given_level,  # below 0: the one after those that levels_ptr counts
    K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    STOPS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    IS_SCALED: tl.constexpr,  # scores are logits / temperature + noise
    HAS_D2T: tl.constexpr,
    LEAST: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    idx = tl.load(sample_ptr + b)
    row = tl.where(idx < 0, R, idx)
    counted = tl.minimum(tl.maximum(tl.load(levels_ptr + b), 0), K - 1)  # of padding, anything
    level = tl.where(given_level < 0, counted, given_level)
    stop = (num_going_ptr, votes_ptr, num_drafts_ptr, threshold_ptr)
    num_voters = tl.num_programs(0)
    if STOPS and not IS_FIRST:
        num_voters = count_drafting(stop, level, idx, row)
        if num_voters == 0:
            return
    token = tl.maximum(lowest_best(best_ptr, ids_ptr, b, tiles, num_rows, BLOCK), 0).to(tl.int64)
    if HAS_D2T:
        token = tl.load(d2t_ptr + token)
    position = tl.load(num_computed_ptr + row) + level
    tl.store(proposed_ptr + b * X + level, token)
    tl.store(tokens_ptr + row * X + level, token)
    tl.debug_barrier()  # every warp has read the count
    tl.store(levels_ptr + b, level + 1)
    own = tl.minimum(level + 1, tl.load(num_drafts_ptr + row))
    room = max_model_len - 1 - (position - level)
    tl.store(num_nodes_ptr + row, tl.maximum(tl.minimum(own, room), 0))
    if HAS_PROBS:
        scale = 1.0
        kind = row * 0
        if IS_SAMPLED:
            temperature = tl.load(temperatures_ptr + b)
            if IS_SCALED:
                scale = tl.where(temperature > 0.0, temperature, 1.0)
            kind = (temperature > 0.0).to(tl.int64)
        share = confidence(best_ptr, sums_ptr, scale, b, tiles, num_rows, BLOCK)
        if HAS_CONFIDENCE:
            share = tl.sqrt(share * tl.load(confidence_ptr + b))
            share = tl.where(share <= 1.0, share, 0.0)
        inside = tl.minimum(tl.maximum(share, LEAST), 1.0 - LEAST)
        odds = tl.load(calibration_ptr + kind * K + level) * (inside / (1.0 - inside))
        prob = odds / (1.0 + odds)
        at = row * X + level
        if not IS_FIRST:
            prob = prob * tl.load(probs_ptr + at - 1, mask=level > 0, other=1.0)
        tl.store(probs_ptr + at, prob)
        if STOPS:
            decide(stop, num_voters, prob, level, idx, row)
    is_valid = (idx >= 0) & (position < max_model_len)
    block = tl.load(block_table_ptr + row * M + position // S, mask=is_valid, other=0)
    tl.store(last_ptr + b, token)
    tl.store(positions_ptr + b, tl.where(is_valid, position, 0))
    tl.store(slots_ptr + b, tl.where(is_valid, block * S + position % S, -1))


def write_level_ref(logits_XW: Tensor, to: DraftLevel, noise: Perturbation | None) -> None:
    buffers = to.buffers
    state = to.state
    B = len(logits_XW) // to.rows_per_req
    row_B1 = buffers.sample_mapping[:B, None]
    level_B = torch.full_like(row_B1[:, 0], to.level or 0)
    if to.level is None:
        level_B = buffers.draft_levels[:B].clamp(0, to.shape.levels - 1)
    drafts_B = drafting_ref(to, level_B)
    position_B1 = state.num_computed_tokens[row_B1] + level_B[:, None]
    is_valid_B1 = (row_B1 >= 0) & (position_B1 < to.max_model_len)
    position_B1 = torch.where(is_valid_B1, position_B1, 0)
    replace(buffers.draft_levels[:B], level_B + 1, drafts_B)
    if to.width == 1:
        token_Bk = _write_nodes_ref(logits_XW, to, noise, level_B, drafts_B)
        slot_Bk = state.slots(position_B1, row_B1, is_valid_B1)
    else:
        add_children_ref(logits_XW, to, noise, drafts_B)
        if to.is_last:
            keep_nodes_ref(B, to)
            return
        token_Bk, slot_Bk = rank_children_ref(to, position_B1, is_valid_B1, drafts_B)
    X = token_Bk.numel()
    replace(buffers.draft_last_tokens[:X], token_Bk, drafts_B)
    replace(buffers.draft_positions[:X], position_B1.expand_as(token_Bk), drafts_B)
    replace(buffers.draft_slots[:X], slot_Bk, drafts_B)


def _write_nodes_ref(
    logits_BW: Tensor,
    to: DraftLevel,
    noise: Perturbation | None,
    level_B: Tensor,
    drafts_B: Tensor,
) -> Tensor:
    """Write each slot's best token to the state; return the tokens [B, 1]."""
    state = to.state
    row_B = to.buffers.sample_mapping[: len(level_B)]
    scores_BW = logits_BW if noise is None else noisy_ref(logits_BW, *noise, to.cut)
    guess_B = id_or_marker_ref(scores_BW, to.cut).clamp(min=0)
    token_B = guess_B if to.d2t_W is None else to.d2t_W[guess_B]
    room_B = to.max_model_len - 1 - state.num_computed_tokens[row_B]
    own_B = torch.minimum(level_B + 1, state.num_draft_tokens[row_B])
    num_nodes_B = torch.minimum(own_B, room_B).clamp(min=0)
    written = [
        (to.buffers.proposed_tokens, torch.arange(len(row_B), device=row_B.device), token_B),
        (state.draft_tokens, row_B, token_B),
    ]
    if to.calibration is not None:
        prob_B = _probs_ref(scores_BW, to, noise, level_B)
        written.append((state.draft_probs, row_B, prob_B))
        decide_ref(to, prob_B, level_B, drafts_B)
    for x, at_B, value_B in written:
        x[at_B, level_B] = torch.where(drafts_B, value_B, x[at_B, level_B])
    state.num_nodes[row_B] = torch.where(drafts_B, num_nodes_B, state.num_nodes[row_B])
    return token_B[:, None]


def _probs_ref(
    scores_BW: Tensor, to: DraftLevel, noise: Perturbation | None, level_B: Tensor
) -> Tensor:
    """Compute the probability that the path up to the node holds."""
    assert to.calibration is not None, to
    temperature_B = torch.zeros_like(scores_BW[:, 0])
    if to.temperature_B is not None:
        temperature_B = to.temperature_B
    scale_B = torch.ones_like(temperature_B)
    if noise is not None:
        temperature_B = noise.noise_keys.temperatures
        scale_B = torch.where(temperature_B > 0, temperature_B, 1.0)
    is_drawn_B = temperature_B > 0
    row_B = to.buffers.sample_mapping[: len(level_B)]
    share_B = confidence_ref(scores_BW, scale_B, to.cut)
    if to.confidence_B is not None:
        share_B = (share_B * to.confidence_B).sqrt().nan_to_num(0.0)
    inside_B = share_B.clamp(LEAST_CONFIDENCE, 1 - LEAST_CONFIDENCE)
    odds_B = to.calibration[is_drawn_B.long(), level_B] * (inside_B / (1 - inside_B))
    before_B = to.state.draft_probs[row_B, (level_B - 1).clamp(min=0)]
    return torch.where(level_B > 0, before_B, 1.0) * (odds_B / (1 + odds_B))
