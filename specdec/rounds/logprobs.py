"""Logprobs of chosen tokens and the best others, by the target's logits before any processor."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.log_sum_exp import log_sum_exp
from specdec.rounds.rank import best

ROWS_AT_ONCE = 128  # of a prompt, so that the logits of all its rows need not exist at once
ROWS_RANKED = 32  # at once, by keys of 8 bytes


class StepLogprobs(NamedTuple):
    """The logprobs of X rows, on the device or on the host."""

    chosen_X: Tensor
    rank_X: Tensor
    top_ids_XN: Tensor
    top_XN: Tensor

    def to_host(self) -> "StepLogprobs":
        """Copy to the host; the copies have arrived once the stream has reached them."""
        return StepLogprobs(*map(_copy, self))

    def row(self, x: int, token: int, num_top: int) -> dict[int, tuple[float, int]]:
        """Logprob and rank by token id: the chosen token first, then the best `num_top`."""
        found = {token: (float(self.chosen_X[x]), int(self.rank_X[x]))}
        top_ids = self.top_ids_XN[x, :num_top].tolist()
        values = self.top_XN[x, :num_top].tolist()
        for i, top_id in enumerate(top_ids):
            found.setdefault(top_id, (values[i], i + 1))
        return found


class RecordedLogprobs(NamedTuple):
    """The logprobs of one step, where requests ask for them."""

    sampled: StepLogprobs | None = None  # one row per decided row
    prompts: Sequence[StepLogprobs | None] = ()  # one per part of a prompt


def _copy(part: Tensor) -> Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return host.copy_(part, non_blocking=True)


def logprobs_of(logits_XV: Tensor, token_X: Tensor, num_top: int) -> StepLogprobs:
    """token_X: the chosen ones; -1 counts as 0. Of equal logits the lowest id is the best."""
    total_X1 = log_sum_exp(logits_XV)[:, None]
    chosen_X1 = logits_XV.gather(1, token_X.clamp(min=0)[:, None])
    num_top = min(num_top, logits_XV.shape[1])
    top_ids_XN = torch.cat([best(part, num_top) for part in torch.split(logits_XV, ROWS_RANKED)])
    top_XN = logits_XV.gather(1, top_ids_XN)
    return StepLogprobs(
        chosen_X=(chosen_X1 - total_X1)[:, 0],
        rank_X=(logits_XV > chosen_X1).sum(dim=-1) + 1,
        top_ids_XN=top_ids_XN,
        top_XN=top_XN - total_X1,
    )


def joined(parts: list[StepLogprobs]) -> StepLogprobs:
    return StepLogprobs(*map(torch.cat, zip(*parts, strict=True)))
