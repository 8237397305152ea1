"""Write what a chunk decided into the state rows. Batch slots that are padding write the scratch row.

`num_reqs` counts padding too: what the draft's passes read of a padded slot is written here, all of it, since each may
be padded to a size of its own. The end of a round is kernels/accept_commit.py.
"""

import torch

from specdec.stepping.buffers import StepBuffers
from specdec.stepping.state import RequestState


def commit_chunk(buffers: StepBuffers, state: RequestState, num_reqs: int, num_tokens: int) -> None:
    """Start the rows whose prompt ended; their last draft row embeds the token that was just sampled.

    A resumed request takes the token that it sampled before its preemption instead: its last draft row embeds it.
    """
    row_B, last_B = buffers.sample_mapping[:num_reqs], buffers.last_token_indices[:num_reqs]
    ids_T, slot_T = buffers.draft_input_ids[:num_tokens], buffers.draft_sample_slots[:num_tokens]
    is_known_B = (row_B >= 0) & (slot_T[last_B] < 0)
    sampled_B = buffers.sampled_tokens[:num_reqs, 0]
    sampled_B.copy_(torch.where(is_known_B, ids_T[last_B], sampled_B))
    # a marker below 0 ends the request, and must not be taken for an id until the host has seen it
    token_B = sampled_B.clamp(min=0)
    state.last_sampled_tokens[row_B] = token_B
    state.num_computed_tokens[row_B] = buffers.positions[last_B] + 1
    ids_T.copy_(torch.where(slot_T >= 0, token_B[slot_T.clamp(min=0)], ids_T))
    buffers.draft_tokens[:num_reqs] = 0
