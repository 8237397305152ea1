"""Logprobs of chosen tokens by the target's own logits, before any processor, beside the best alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROWS_AT_ONCE = 128  # of a prompt, whose logits need not all exist at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogprobs:
    """Of X rows, on the device or on the host."""

    chosen_X: Tensor
    rank_X: Tensor
    top_ids_XN: Tensor
    top_XN: Tensor

    def to_host(self, is_async: bool = False) -> "StepLogprobs":
        """Copies that are there once the stream has reached them; copies to pageable memory wait for it."""
        parts = (self.chosen_X, self.rank_X, self.top_ids_XN, self.top_XN)
        chosen_X, rank_X, top_ids_XN, top_XN = (_copy(part, is_async) for part in parts)
        return StepLogprobs(chosen_X=chosen_X, rank_X=rank_X, top_ids_XN=top_ids_XN, top_XN=top_XN)

    def row(self, x: int, token: int, num_top: int) -> dict[int, tuple[float, int]]:
        """Logprob and rank by token id: the chosen token first, then the best `num_top`."""
        found = {token: (float(self.chosen_X[x]), int(self.rank_X[x]))}
        tops = zip(
            self.top_ids_XN[x, :num_top].tolist(), self.top_XN[x, :num_top].tolist(), strict=True
        )
        for rank, (top_id, value) in enumerate(tops, start=1):
            found.setdefault(top_id, (value, rank))
        return found


class RecordedLogprobs(NamedTuple):
    """Of one step, where requests ask for them."""

    sampled: StepLogprobs | None = None  # one row per decided row
    prompts: Sequence[StepLogprobs | None] = ()  # one per part of a chunk


def _copy(part: Tensor, is_async: bool) -> Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=is_async and part.is_cuda)
    return host.copy_(part, non_blocking=is_async)


def logprobs_of(logits_XV: Tensor, token_X: Tensor, num_top: int) -> StepLogprobs:
    """token_X: the chosen ones; -1 counts as 0."""
    total_X1 = logits_XV.logsumexp(dim=-1, keepdim=True)
    chosen_X1 = logits_XV.gather(1, token_X.clamp(min=0)[:, None])
    top_XN, top_ids_XN = logits_XV.topk(min(num_top, logits_XV.shape[1]), dim=-1)
    return StepLogprobs(
        chosen_X=(chosen_X1 - total_X1)[:, 0],
        rank_X=(logits_XV > chosen_X1).sum(dim=-1) + 1,
        top_ids_XN=top_ids_XN,
        top_XN=top_XN - total_X1,
    )


def joined(parts: list[StepLogprobs]) -> StepLogprobs:
    """Rows behind one another."""
    return StepLogprobs(
        chosen_X=torch.cat([part.chosen_X for part in parts]),
        rank_X=torch.cat([part.rank_X for part in parts]),
        top_ids_XN=torch.cat([part.top_ids_XN for part in parts]),
        top_XN=torch.cat([part.top_XN for part in parts]),
    )
