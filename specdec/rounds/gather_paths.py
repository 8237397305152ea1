"""Rounds cut down to accepted paths: features, and the rows of prompts that lay after all nodes."""

import torch

from specdec.kernels import jit, launch_options, pick, tl
from specdec.kernels.overlap import begin
from specdec.rounds.buffers import StepBuffers
from specdec.sizes import DraftShape

AT_ONCE = 1024  # rows that the kernel moves in an iteration


def gather_paths(
    buffers: StepBuffers, num_reqs: int, shape: DraftShape, num_prompt_rows: int, num_rows: int
) -> None:
    """Bring what the draft reads to the rows of paths, the same number for each slot.

    Then come num_prompt_rows rows of prompts, and padding up to num_rows.
    """
    first = num_reqs * shape.path_len
    if num_rows > first:
        move = pick(buffers.positions, launch_move_prompts, move_prompts_ref)
        move(buffers, num_reqs, shape, num_prompt_rows, num_rows)
    at_T = buffers.path_sources[:num_rows]
    buffers.features[:num_rows] = buffers.features[at_T]


def launch_move_prompts(
    buffers: StepBuffers, num_reqs: int, shape: DraftShape, num_prompt_rows: int, num_rows: int
) -> None:
    moved = buffers.positions, buffers.slot_mapping, buffers.draft_input_ids
    last_rows = buffers.last_token_indices
    _move_prompts_kernel[(1,)](
        *(*moved, buffers.path_sources, last_rows),
        *(len(last_rows), num_reqs, num_prompt_rows, num_rows),
        N=shape.rows,
        Q=shape.path_len,
        BLOCK=AT_ONCE,
        num_warps=8,
        **launch_options(buffers.positions),
    )


@jit(varying=("max_reqs", "num_reqs", "num_prompt_rows", "num_rows"))
def _move_prompts_kernel(
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    draft_ids_ptr,  # [T]
    sources_ptr,  # [T] path_sources
    last_rows_ptr,  # [max_reqs] last_token_indices
    max_reqs,
    num_reqs,
    num_prompt_rows,
    num_rows,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.arange(0, BLOCK)
    first = num_reqs * Q
    for start in range(first, num_rows, BLOCK):
        t = start + i
        inside = t < num_rows
        source = t + num_reqs * (N - Q)
        is_prompt = inside & (t < first + num_prompt_rows)
        position = tl.load(positions_ptr + source, mask=is_prompt, other=0)
        slot = tl.load(slots_ptr + source, mask=is_prompt, other=-1)
        token = tl.load(draft_ids_ptr + source, mask=is_prompt, other=0)
        # loads before stores: an iteration may write what it reads, but not what later ones read
        tl.debug_barrier()
        tl.store(positions_ptr + t, position, mask=inside)
        tl.store(slots_ptr + t, slot, mask=inside)
        tl.store(draft_ids_ptr + t, token, mask=inside)
        tl.store(sources_ptr + t, tl.where(is_prompt, source, 0).to(tl.int64), mask=inside)
    for start in range(num_reqs, max_reqs, BLOCK):
        b = start + i
        last = tl.load(last_rows_ptr + b, mask=b < max_reqs, other=0)
        moved = last - num_reqs * (N - Q)
        tl.store(last_rows_ptr + b, moved, mask=(b < max_reqs) & (last >= num_reqs * N))


def move_prompts_ref(
    buffers: StepBuffers, num_reqs: int, shape: DraftShape, num_prompt_rows: int, num_rows: int
) -> None:
    """Write the rows after the paths: those of prompts, which lay after all nodes, then padding."""
    N, Q = shape.rows, shape.path_len
    first = num_reqs * Q
    t_T = torch.arange(first, num_rows, device=buffers.positions.device)
    is_prompt_T = t_T < first + num_prompt_rows
    at_T = torch.where(is_prompt_T, t_T + num_reqs * (N - Q), 0)
    padding = ((buffers.positions, 0), (buffers.slot_mapping, -1), (buffers.draft_input_ids, 0))
    for buffer, value in padding:
        buffer[first:num_rows] = torch.where(is_prompt_T, buffer[at_T], value)
    buffers.path_sources[first:num_rows] = at_T
    last = buffers.last_token_indices[num_reqs:]
    last.copy_(torch.where(last >= num_reqs * N, last - num_reqs * (N - Q), last))
