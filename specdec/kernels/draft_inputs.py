"""The one row per request of a draft decode step: the position behind the previous row's, its slot, its token.

Draft step j (1..K-1) stands at num_computed - 1 + j: the seed row (j = 0) is the last committed pair. Positions beyond
the context are padding.
"""

import torch

from specdec.buffers import StepBuffers
from specdec.kernels.slot_mapping import slot_mapping_ref
from specdec.kv_cache import BLOCK_SIZE
from specdec.state import RequestState


def fill_draft_step(buffers: StepBuffers, state: RequestState, num_reqs: int, step: int, max_model_len: int) -> None:
    """Position, slot and token of draft step `step` for every batch slot that samples."""
    fill_draft_step_ref(buffers, state, num_reqs, step, max_model_len)


def fill_draft_step_ref(
    buffers: StepBuffers, state: RequestState, num_reqs: int, step: int, max_model_len: int
) -> None:
    row_B = buffers.sample_mapping[:num_reqs]
    position_B = state.num_computed_tokens[row_B] - 1 + step
    is_valid_B = (row_B >= 0) & (position_B < max_model_len)
    slots_B = slot_mapping_ref(position_B, row_B, state.block_table, BLOCK_SIZE, is_valid_B)
    buffers.draft_positions[:num_reqs] = torch.where(is_valid_B, position_B, 0)
    buffers.draft_slots[:num_reqs] = slots_B
    buffers.draft_last_tokens[:num_reqs] = buffers.draft_tokens[:num_reqs, step - 1]
