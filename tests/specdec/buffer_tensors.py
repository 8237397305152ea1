"""Step buffers of a few sizes, and all their tensors by name, those of candidates too."""

import torch
from torch import Tensor

from specdec.rounds.buffers import StepBuffers
from specdec.sizes import EngineSizes, TreeShape


def step_buffers(
    device: torch.device,
    num_reqs: int,
    drafts: int | TreeShape,
    hidden_size: int = 1,
    more_rows: int = 9,
    **more: object,
) -> StepBuffers:
    """drafts: K of chains, or trees. more_rows: beside those that verify."""
    tree = None if isinstance(drafts, int) else drafts
    sizes = EngineSizes(
        max_model_len=150,
        max_num_seqs=num_reqs,
        max_num_batched_tokens=more_rows,
        num_speculative_tokens=drafts if tree is None else tree.max_depth,
        tree=tree,
        **{"num_kv_blocks": 40} | more,
    )
    widths = {"hidden_size": hidden_size, "draft_hidden_size": hidden_size}
    return StepBuffers(sizes, torch.float32, device, **widths)


def buffer_tensors(buffers: StepBuffers) -> dict[str, Tensor]:
    found = {f"candidate_{name}": value for name, value in vars(buffers.candidates).items()}
    named = {**vars(buffers), **found}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
