"""The rows of a prefill chunk. The host knows them all, so it lays them out and copies them into the static buffers."""

from collections.abc import Sequence

import numpy as np

from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.upload import upload


def fill_chunk(
    buffers: StepBuffers, parts: Sequence[PromptPart], num_reqs: int, num_tokens: int
) -> None:
    """Write the parts into the buffers, padded to `num_reqs` batch slots and `num_tokens` rows.

    A draft row embeds the token behind its own: the next prompt token, also behind a chunk that does not end the
    prompt, or the token that this step will sample (draft_sample_slots). A resumed request's last sampled token is
    known, and what is drawn in its place does not count.
    """
    T = sum(part.length for part in parts)
    ids, positions, next_ids = (np.zeros(num_tokens, np.int64) for _ in range(3))
    slots, sample_slots = (np.full(num_tokens, -1, np.int64) for _ in range(2))
    rows, sample_rows = (np.full(num_reqs, -1, np.int64) for _ in range(2))
    last, starts = np.zeros(num_reqs, np.int64), np.full(num_reqs + 1, num_tokens, np.int64)
    start = 0
    for b, part in enumerate(parts):
        here = slice(start, start + part.length)
        position = np.arange(part.start, part.start + part.length)
        ids[here], positions[here] = part.prompt[part.start : part.start + part.length], position
        slots[here] = (
            np.asarray(part.blocks)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        )
        following = part.prompt[part.start + 1 : part.start + part.length + 1]
        next_ids[start : start + len(following)] = following
        rows[b], starts[b], last[b] = part.row, start, start + part.length - 1
        if part.ends_prompt:
            sample_rows[b] = part.row
        if part.samples:
            sample_slots[last[b]] = b
        start += part.length
    starts[len(parts)] = T
    upload(buffers.input_ids, ids)
    upload(buffers.positions, positions)
    upload(buffers.slot_mapping, slots)
    upload(buffers.draft_input_ids, next_ids)
    upload(buffers.draft_sample_slots, sample_slots)
    upload(buffers.idx_mapping, rows)
    upload(buffers.sample_mapping, sample_rows)
    upload(buffers.last_token_indices, last)
    upload(buffers.query_start_loc, starts)
