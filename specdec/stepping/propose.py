"""One draft token per request: the best by the draft's logits, as the target's id.

Draft level j (0..K-1) has position num_computed - 1 + j: level 0 is the seed row, the last
committed pair. The row that follows embeds the token at the next position; positions beyond the
context are padding (position 0, slot -1). A draft is a guess: where its logits leave no choice it
is the head's token 0, never a marker.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, pick, tl, use_triton
from specdec.kernels.best_token import best_token_ref, launch_tile_maxima, lowest_best
from specdec.kernels.choose_token import NoiseKeys, choose_token_ref, launch_choices
from specdec.kernels.overlap import begin
from specdec.sizes import BLOCK_SIZE
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevel:
    """Where the tokens of one level go: draft token `level` of each batch slot, and the next row.

    d2t_W: target ids of the draft's, None where they are the same.
    """

    buffers: StepBuffers
    state: RequestState
    level: int
    d2t_W: Tensor | None
    max_model_len: int


def propose(normed_BD: Tensor, weight_WD: Tensor, to: DraftLevel) -> None:
    """Write the best tokens; after the last level, all K to the state rows. weight_WD: the head."""
    pick(normed_BD, launch_propose, propose_ref)(normed_BD, weight_WD, to)


def propose_sampled(
    logits_BW: Tensor, floor_B: Tensor, noise_keys: NoiseKeys, to: DraftLevel
) -> None:
    """The same for tokens that are chosen from logits with noise."""
    if use_triton(logits_BW):
        launch_write_level(*launch_choices(logits_BW, floor_B, noise_keys), to)
    else:
        write_level_ref(choose_token_ref(logits_BW, floor_B, noise_keys), to)


def launch_propose(normed_BD: Tensor, weight_WD: Tensor, to: DraftLevel) -> None:
    launch_write_level(*launch_tile_maxima(normed_BD, weight_WD), to)


def launch_write_level(best: Tensor, ids: Tensor, to: DraftLevel) -> None:
    """Reduce the maxima of tiles [tiles, B] to tokens, and write what follows from them."""
    buffers = to.buffers
    state = to.state
    tiles, B = best.shape
    K = buffers.draft_tokens.shape[1]
    _propose_kernel[(B,)](
        buffers.draft_tokens,
        buffers.draft_last_tokens,
        buffers.draft_positions,
        buffers.draft_slots,
        state.draft_tokens,
        best,
        ids,
        ids if to.d2t_W is None else to.d2t_W,
        buffers.sample_mapping,
        state.num_computed_tokens,
        state.block_table,
        tiles,
        B,
        state.block_table.shape[0] - 1,
        state.block_table.shape[1],
        to.max_model_len,
        K=K,
        K_PADDED=next_power_of_2(K),
        LEVEL=to.level,
        HAS_D2T=to.d2t_W is not None,
        S=BLOCK_SIZE,
        BLOCK=next_power_of_2(tiles),
        num_warps=4,
        **launch_options(best),
    )


@jit(varying=("tiles", "B"))
def _propose_kernel(
    tokens_ptr,  # [B, K]
    last_ptr,  # [B]
    positions_ptr,  # [B]
    slots_ptr,  # [B]
    state_tokens_ptr,  # [R + 1, K]
    best_ptr,  # [tiles, B]
    ids_ptr,  # [tiles, B]
    d2t_ptr,  # [W]
    sample_ptr,  # [B]
    num_computed_ptr,  # [R + 1]
    block_table_ptr,  # [R + 1, M]
    tiles,
    B,
    R,
    M,
    max_model_len,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    LEVEL: tl.constexpr,
    HAS_D2T: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    b = tl.program_id(0)
    token = tl.maximum(lowest_best(best_ptr, ids_ptr, b, tiles, B, BLOCK), 0).to(tl.int64)
    if HAS_D2T:
        token = tl.load(d2t_ptr + token)
    tl.store(tokens_ptr + b * K + LEVEL, token)
    idx = tl.load(sample_ptr + b)
    row = tl.where(idx < 0, R, idx)
    if LEVEL + 1 < K:
        position = tl.load(num_computed_ptr + row) + LEVEL
        is_valid = (idx >= 0) & (position < max_model_len)
        block = tl.load(block_table_ptr + row * M + position // S, mask=is_valid, other=0)
        tl.store(last_ptr + b, token)
        tl.store(positions_ptr + b, tl.where(is_valid, position, 0))
        tl.store(slots_ptr + b, tl.where(is_valid, block * S + position % S, -1))
    else:
        i = tl.arange(0, K_PADDED)
        earlier = tl.load(tokens_ptr + b * K + i, mask=i < LEVEL, other=0)
        tl.store(state_tokens_ptr + row * K + i, tl.where(i == LEVEL, token, earlier), mask=i < K)


def propose_ref(normed_BD: Tensor, weight_WD: Tensor, to: DraftLevel) -> None:
    write_level_ref(best_token_ref(normed_BD, weight_WD), to)


def write_level_ref(id_B: Tensor, to: DraftLevel) -> None:
    buffers = to.buffers
    state = to.state
    B = len(id_B)
    K = buffers.draft_tokens.shape[1]
    row_B = buffers.sample_mapping[:B]
    guess_B = id_B.clamp(min=0)
    token_B = guess_B if to.d2t_W is None else to.d2t_W[guess_B]
    buffers.draft_tokens[:B, to.level] = token_B
    if to.level + 1 == K:
        state.draft_tokens[row_B] = buffers.draft_tokens[:B]  # row -1, padding: the scratch row
        return
    position_B = state.num_computed_tokens[row_B] + to.level
    is_valid_B = (row_B >= 0) & (position_B < to.max_model_len)
    buffers.draft_last_tokens[:B] = token_B
    buffers.draft_positions[:B] = torch.where(is_valid_B, position_B, 0)
    buffers.draft_slots[:B] = state.slots(position_B, row_B, is_valid_B)
