"""One draft token per request: the best by the draft's logits, as the target's id.

Draft level j (0..K-1) has position num_computed - 1 + j: level 0 is the seed row, the last
committed pair. The row that follows embeds the token at the next position; positions beyond the
context are padding (position 0, slot -1). A draft is a guess: where its logits leave no choice it
is the head's token 0, never a marker.

Where the number of levels varies from step to step (`calibration` is given), each level goes to the
state rows at once, with the probability that the chain holds up to it: the product over its levels
of the draft's own probability, whose odds are multiplied by a factor. For a greedy draft that is
its softmax probability; for one drawn with noise g, that of the softmax of logits + temperature *
g. With a `threshold` drafts go on only while paths reach it on average (stop_drafting.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.best_token import (
    TileMaxima,
    confidence,
    confidence_ref,
    id_or_marker_ref,
    launch_tile_maxima,
    lowest_best,
)
from specdec.kernels.choose_token import NoiseKeys, launch_choices, noisy_ref
from specdec.kernels.linear import linear_ref
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.rounds.stop_drafting import count_drafting, decide, decide_ref, drafting_ref
from specdec.sizes import BLOCK_SIZE

# clamps the draft's probabilities to here and 1 - this
LEAST_CONFIDENCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevel:
    """Where the tokens of one level go: draft token `level` of each batch slot, and the next row.

    level: None: the level after those that state.num_nodes counts
    d2t_W: target ids of the draft's, None: the draft has the target's ids
    calibration: [2, K] factor of the odds by level, of greedy and of sampled requests; None: all K
        levels are drafted, and the last one brings the tokens to the state rows
    threshold: [1] see stop_drafting.py, with a calibration; None: no slot stops
    """

    buffers: StepBuffers
    state: RequestState
    level: int | None
    d2t_W: Tensor | None
    max_model_len: int
    calibration: Tensor | None = None
    threshold: Tensor | None = None


def propose(normed_BD: Tensor, weight_WD: Tensor, to: DraftLevel) -> None:
    """Write the best tokens; after the last level, all K to the state rows. weight_WD: the head."""
    if not use_triton(normed_BD):
        propose_ref(normed_BD, weight_WD, to)
        return
    has_sums = to.calibration is not None
    launch_write_level(launch_tile_maxima(normed_BD, weight_WD, None, has_sums), to)


def propose_sampled(
    logits_BW: Tensor, floor_B: Tensor, noise_keys: NoiseKeys, to: DraftLevel
) -> None:
    """Write the tokens that are chosen from logits with noise, as `propose` does."""
    temperature_B = noise_keys.temperatures
    if use_triton(logits_BW):
        has_sums = to.calibration is not None
        choices = launch_choices(logits_BW, floor_B, noise_keys, has_sums)
        launch_write_level(choices, to, temperature_B)
    else:
        write_level_ref(noisy_ref(logits_BW, floor_B, noise_keys), to, temperature_B)


def launch_write_level(
    maxima: TileMaxima, to: DraftLevel, temperature_B: Tensor | None = None
) -> None:
    """Reduce the maxima of tiles to tokens, and write what follows from them."""
    buffers = to.buffers
    state = to.state
    best, ids, sums = maxima
    tiles, B = best.shape
    K = buffers.draft_tokens.shape[1]
    rows = buffers.draft_last_tokens, buffers.draft_positions, buffers.draft_slots
    votes = buffers.num_going, buffers.votes
    drafts = state.draft_tokens, state.num_nodes, state.draft_probs
    slots = buffers.sample_mapping, state.num_computed_tokens, state.num_draft_tokens
    R, M = state.block_table.shape
    X = state.draft_tokens.shape[1]
    _propose_kernel[(B,)](
        *(buffers.draft_tokens, *rows, *votes, *drafts, best, ids),
        best if sums is None else sums,
        best if temperature_B is None else temperature_B,
        best if to.calibration is None else to.calibration,
        best if to.threshold is None else to.threshold,
        ids if to.d2t_W is None else to.d2t_W,
        *(*slots, state.block_table, tiles, B, R - 1, X, M, to.max_model_len),
        K=K,
        K_PADDED=next_power_of_2(K),
        LEVEL=-1 if to.level is None else to.level,
        VARIES=to.calibration is not None,
        STOPS=to.threshold is not None,
        IS_SAMPLED=temperature_B is not None,
        HAS_D2T=to.d2t_W is not None,
        LEAST=LEAST_CONFIDENCE,
        S=BLOCK_SIZE,
        BLOCK=next_power_of_2(tiles),
        num_warps=4,
        **launch_options(best),
    )


@jit(varying=("temperatures_ptr", "tiles", "B"))
def _propose_kernel(
    tokens_ptr,  # [B, K]
    last_ptr,  # [B]
    positions_ptr,  # [B]
    slots_ptr,  # [B]
    num_going_ptr,  # [1] with STOPS
    votes_ptr,  # [1] with STOPS
    state_tokens_ptr,  # [R + 1, X]
    num_live_ptr,  # [R + 1], with VARIES
    probs_ptr,  # [R + 1, X] float32, with VARIES
    best_ptr,  # [tiles, B]
    ids_ptr,  # [tiles, B]
    sums_ptr,  # [tiles, B] float32, with VARIES
    temperatures_ptr,  # [B] float32, with IS_SAMPLED
    calibration_ptr,  # [2, K] float32, with VARIES
    threshold_ptr,  # [1] float32, with STOPS
    d2t_ptr,  # [W]
    sample_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    num_drafts_ptr,  # [R + 1] num_draft_tokens, with STOPS
    block_table_ptr,  # [R + 1, M]
    tiles,
    B,
    R,
    X,
    M,
    max_model_len,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    LEVEL: tl.constexpr,
    VARIES: tl.constexpr,
    STOPS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
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
    level = row * 0 + LEVEL
    if LEVEL < 0:
        level = tl.minimum(tl.load(num_live_ptr + row), K - 1)  # padding counts on
    num_voters = tl.num_programs(0)
    if STOPS and LEVEL != 0:
        num_voters = count_drafting(num_going_ptr, num_drafts_ptr, threshold_ptr, level, idx, row)
        if num_voters == 0:
            return
    token = tl.maximum(lowest_best(best_ptr, ids_ptr, b, tiles, B, BLOCK), 0).to(tl.int64)
    if HAS_D2T:
        token = tl.load(d2t_ptr + token)
    tl.store(tokens_ptr + b * K + level, token)
    if VARIES:
        scale = 1.0
        kind = row * 0
        if IS_SAMPLED:
            temperature = tl.load(temperatures_ptr + b)
            scale = tl.where(temperature > 0.0, temperature, 1.0)
            kind = (temperature > 0.0).to(tl.int64)
        share = confidence(best_ptr, sums_ptr, scale, b, tiles, B, BLOCK)
        inside = tl.minimum(tl.maximum(share, LEAST), 1.0 - LEAST)
        odds = tl.load(calibration_ptr + kind * K + level) * (inside / (1.0 - inside))
        prob = odds / (1.0 + odds)
        at = row * X + level
        if LEVEL != 0:
            prob = prob * tl.load(probs_ptr + at - 1, mask=level > 0, other=1.0)
        tl.store(probs_ptr + at, prob)
        tl.store(state_tokens_ptr + at, token)
        tl.store(num_live_ptr + row, level + 1)
        if STOPS:
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
    if VARIES or LEVEL + 1 < K:
        position = tl.load(num_computed_ptr + row) + level
        is_valid = (idx >= 0) & (position < max_model_len)
        block = tl.load(block_table_ptr + row * M + position // S, mask=is_valid, other=0)
        tl.store(last_ptr + b, token)
        tl.store(positions_ptr + b, tl.where(is_valid, position, 0))
        tl.store(slots_ptr + b, tl.where(is_valid, block * S + position % S, -1))
    else:
        i = tl.arange(0, K_PADDED)
        earlier = tl.load(tokens_ptr + b * K + i, mask=i < LEVEL, other=0)
        tl.store(state_tokens_ptr + row * X + i, tl.where(i == LEVEL, token, earlier), mask=i < K)


def propose_ref(normed_BD: Tensor, weight_WD: Tensor, to: DraftLevel) -> None:
    write_level_ref(linear_ref(normed_BD, weight_WD, None, torch.float32), to)


def write_level_ref(scores_BW: Tensor, to: DraftLevel, temperature_B: Tensor | None = None) -> None:
    """scores_BW: logits, or logits / temperature with noise."""
    buffers = to.buffers
    state = to.state
    B = len(scores_BW)
    K = buffers.draft_tokens.shape[1]
    row_B = buffers.sample_mapping[:B]
    b_B = torch.arange(B, device=row_B.device)
    guess_B = id_or_marker_ref(scores_BW).clamp(min=0)
    token_B = guess_B if to.d2t_W is None else to.d2t_W[guess_B]
    if to.level is None:
        level_B = state.num_nodes[row_B].clamp(max=K - 1)
    else:
        level_B = torch.full_like(row_B, to.level)
    drafts_B = torch.ones_like(row_B, dtype=torch.bool)
    if to.threshold is not None and to.level != 0:
        drafts_B = drafting_ref(buffers, state, to.threshold, level_B)
    _replace(buffers.draft_tokens, (b_B, level_B), token_B, drafts_B)
    if to.calibration is not None:
        prob_B = _keep_prob_ref(scores_BW, to, temperature_B, level_B, drafts_B)
        _replace(state.draft_tokens, (row_B, level_B), token_B, drafts_B)
        _replace(state.num_nodes, (row_B,), level_B + 1, drafts_B)
        if to.threshold is not None:
            decide_ref(buffers, state, to.threshold, prob_B, level_B, drafts_B)
    elif to.level is not None and to.level + 1 == K:
        state.draft_tokens[row_B, :K] = buffers.draft_tokens[:B]  # row -1, padding: the scratch row
        return
    position_B = state.num_computed_tokens[row_B] + level_B
    is_valid_B = (row_B >= 0) & (position_B < to.max_model_len)
    _replace(buffers.draft_last_tokens, (b_B,), token_B, drafts_B)
    _replace(buffers.draft_positions, (b_B,), torch.where(is_valid_B, position_B, 0), drafts_B)
    _replace(buffers.draft_slots, (b_B,), state.slots(position_B, row_B, is_valid_B), drafts_B)


def _replace(x: Tensor, at: tuple[Tensor, ...], value_B: Tensor, drafts_B: Tensor) -> None:
    """Replace the places of slots that draft the level; the others keep what they have."""
    x[at] = torch.where(drafts_B, value_B, x[at])


def _keep_prob_ref(
    scores_BW: Tensor,
    to: DraftLevel,
    temperature_B: Tensor | None,
    level_B: Tensor,
    drafts_B: Tensor,
) -> Tensor:
    """Keep the path's probability, which is returned."""
    assert to.calibration is not None, to
    state = to.state
    row_B = to.buffers.sample_mapping[: len(scores_BW)]
    scale_B = torch.ones_like(scores_BW[:, 0])
    kind_B = torch.zeros_like(row_B)
    if temperature_B is not None:
        scale_B = torch.where(temperature_B > 0, temperature_B, scale_B)
        kind_B = (temperature_B > 0).long()
    share_B = confidence_ref(scores_BW, scale_B)
    inside_B = share_B.clamp(LEAST_CONFIDENCE, 1 - LEAST_CONFIDENCE)
    odds_B = to.calibration[kind_B, level_B] * (inside_B / (1 - inside_B))
    prob_B = odds_B / (1 + odds_B)
    before_B = state.draft_probs[row_B, (level_B - 1).clamp(min=0)]
    path_B = torch.where(level_B > 0, before_B, 1.0) * prob_B
    _replace(state.draft_probs, (row_B, level_B), path_B, drafts_B)
    return path_B
