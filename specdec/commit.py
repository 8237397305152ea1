"""Write what a step decided into the state rows. Batch slots that are padding write the scratch row.

`num_reqs` counts padding too: what the draft's passes read of a padded slot is written here, all of it, since each may
be padded to a size of its own.
"""

import torch

from specdec.accept import greedy_accept
from specdec.buffers import StepBuffers
from specdec.state import RequestState


def accept_round(buffers: StepBuffers, num_reqs: int) -> None:
    """Decide a round: sampled_tokens are the target's choices, of which num_accepted + 1 count."""
    Q = buffers.sampled_tokens.shape[1]
    target_tokens_BQ = buffers.target_tokens[: num_reqs * Q].view(num_reqs, Q)
    draft_tokens_BK = buffers.input_ids[: num_reqs * Q].view(num_reqs, Q)[:, 1:]
    buffers.sampled_tokens[:num_reqs] = target_tokens_BQ
    buffers.verified_tokens[:num_reqs] = draft_tokens_BK
    buffers.num_accepted[:num_reqs] = greedy_accept(target_tokens_BQ, draft_tokens_BK, buffers.num_valid[:num_reqs])


def commit_round(buffers: StepBuffers, state: RequestState, num_reqs: int) -> None:
    """Advance the rows by num_accepted + 1; the draft's rows embed the sampled tokens, its seed is row num_accepted."""
    row_B, accepted_B = buffers.sample_mapping[:num_reqs], buffers.num_accepted[:num_reqs]
    Q = buffers.sampled_tokens.shape[1]
    state.num_computed_tokens[row_B] = state.num_computed_tokens[row_B] + accepted_B + 1
    state.last_sampled_tokens[row_B] = buffers.sampled_tokens[:num_reqs].gather(1, accepted_B[:, None])[:, 0]
    is_real_B1 = (row_B >= 0)[:, None]
    buffers.draft_input_ids[: num_reqs * Q] = torch.where(is_real_B1, buffers.sampled_tokens[:num_reqs], 0).view(-1)
    last_B1 = torch.arange(num_reqs, device=row_B.device)[:, None] * Q + accepted_B[:, None]
    buffers.last_token_indices[:num_reqs] = torch.where(is_real_B1, last_B1, 0)[:, 0]
    buffers.draft_tokens[:num_reqs] = 0


def commit_chunk(buffers: StepBuffers, state: RequestState, num_reqs: int, num_tokens: int) -> None:
    """Start the rows whose prompt ended; their last draft row embeds the token that was just sampled."""
    row_B, last_B = buffers.sample_mapping[:num_reqs], buffers.last_token_indices[:num_reqs]
    token_B, slot_T = buffers.sampled_tokens[:num_reqs, 0], buffers.draft_sample_slots[:num_tokens]
    state.last_sampled_tokens[row_B] = token_B
    state.num_computed_tokens[row_B] = buffers.positions[last_B] + 1
    ids_T = buffers.draft_input_ids[:num_tokens]
    ids_T.copy_(torch.where(slot_T >= 0, token_B[slot_T.clamp(min=0)], ids_T))
    buffers.draft_tokens[:num_reqs] = 0
