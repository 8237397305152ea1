"""The end of a draft by confidence: a level is drafted while the last one's best path is likely.

A batch slot goes on while the best path of its last level has a probability of at least the
threshold, and while its request may have another level; what it drafts does not depend on the other
slots. A slot that has stopped keeps what it has: later levels compute something for it and write
nothing. When none goes on (buffers.num_going is 0), the heavy kernels of the remaining levels
return at once (kernels/needed.py).

The threshold [1] is on the device. Below 0 all slots go on, padding too: so the start measures what
levels cost.
"""

import torch
from torch import Tensor

from specdec.kernels import jit, tl
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState


@jit
def has_stopped(levels_ptr, num_going_ptr, level, b):
    """Whether slot b does not draft this level.

    Where no slot goes on, nothing was computed, not for padding either, whose levels are old ones.
    One that goes on counts itself until it decides.
    """
    return (tl.load(levels_ptr + b) <= level) | (tl.load(num_going_ptr) == 0)


@jit
def decide(
    levels_ptr,  # [B]
    num_going_ptr,  # [1]
    num_drafts_ptr,  # [R + 1]
    threshold_ptr,  # [1] float32
    prob,
    level,
    b,
    idx,
    row,
    IS_FIRST: tl.constexpr,
):
    """Whether slot b goes on after `level`, whose best path has this probability."""
    threshold = tl.load(threshold_ptr)
    is_kept = threshold < 0.0
    has_room = (idx >= 0) & (level + 1 < tl.load(num_drafts_ptr + row))
    goes_on = ((has_room & (prob >= threshold)) | is_kept).to(tl.int64)
    tl.store(levels_ptr + b, level + 1 + goes_on)
    change = goes_on if IS_FIRST else goes_on - 1
    tl.atomic_add(num_going_ptr, change, mask=(idx >= 0) | is_kept, sem="relaxed")


def decide_ref(
    buffers: StepBuffers,
    state: RequestState,
    threshold: Tensor,
    prob_B: Tensor,
    level_B: Tensor,
    drafts_B: Tensor,
) -> None:
    """For all slots. drafts_B: those that drafted the level, whose index is in level_B."""
    B = len(prob_B)
    row_B = buffers.sample_mapping[:B]
    is_kept = threshold < 0
    has_room_B = (row_B >= 0) & (level_B + 1 < state.num_draft_tokens[row_B])
    goes_on_B = (has_room_B & (prob_B >= threshold)) | is_kept
    levels_B = level_B + 1 + goes_on_B
    buffers.draft_levels[:B] = torch.where(drafts_B, levels_B, buffers.draft_levels[:B])
    counts_B = drafts_B & ((row_B >= 0) | is_kept)
    was_going_B = level_B > 0
    change_B = torch.where(counts_B, goes_on_B.long() - was_going_B.long(), 0)
    buffers.num_going.add_(change_B.sum())
