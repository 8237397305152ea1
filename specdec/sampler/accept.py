"""Acceptance by p/q: which drafts hold, and the weights from which the next token is drawn.

"rejection" goes from left to right up to the first draft that fails; "block" takes the longest
prefix that passes. Both keep the target's law whatever the draft's probabilities are, if the drafts
were really drawn from them. Coins are compared as u * denominator < numerator, never divided: a
draft of probability 0 never passes, one at least as likely under the target always does. Letters:
B, K, Q = K + 1, V.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.block_sums import sum_over_ids
from specdec.kernels.cut_ids import CutIds, columns_of, greatest_over_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The drafts to decide on. Rows after num_drafts_B are padding.

    cut: the ids of the columns, where others have the rest
    """

    target_probs_BQV: Tensor  # after all processors, zeros where no token is left
    draft_probs_BKV: Tensor  # over the target's ids, 0 where the draft has none
    draft_tokens_BK: Tensor
    num_drafts_B: Tensor  # 0..K
    cut: CutIds | None = None

    def of_drafts(self) -> tuple[Tensor, Tensor]:
        """Gather the target's and the draft's probability of each draft, [B, K]."""
        token_BK1 = self.draft_tokens_BK[..., None]
        column_BK1, is_here_BK1 = columns_of(token_BK1, self.draft_probs_BKV, self.cut)
        target_BK1 = self.target_probs_BQV[:, : token_BK1.shape[1]].gather(2, column_BK1)
        both = torch.cat([target_BK1, self.draft_probs_BKV.gather(2, column_BK1)], dim=-1)
        if self.cut is not None:  # others have 0
            both = self.cut.greatest(both.where(is_here_BK1, 0.0))
        target_BK, draft_BK = both.unbind(-1)
        return target_BK, draft_BK


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """num_accepted_B drafts hold; the next token is drawn from weights_BV (not normalised)."""

    num_accepted_B: Tensor
    weights_BV: Tensor
    is_bonus_B: Tensor  # all drafts hold


def rejection_accept(drafted: Drafted, coins_BK: Tensor) -> Decision:
    """Accept with min(1, p / q), left to right; after a rejection draw from max(p - q, 0)."""
    passes_BK = coins_pass(coins_BK, *drafted.of_drafts()) & _is_draft(drafted)
    num_accepted_B = passes_BK.long().cumprod(dim=1).sum(dim=1)
    return _decide(drafted, num_accepted_B, torch.ones_like(drafted.target_probs_BQV[:, :, 0]))


def block_accept(drafted: Drafted, coins_BK: Tensor) -> Decision:
    """Block verification: the longest prefix i whose own coin passes R_i / (R_i + 1 - P_i).

    P_i = min(1, P_(i-1) p / q) of the i drafts, R_i = sum of max(P_i p - q, 0) after them. The coin
    of all K drafts is compared with P_K.
    """
    prefix_BQ = prefix_probs(drafted)
    numerator_BK, denominator_BK = block_odds(drafted, prefix_BQ)
    passes_BK = coins_pass(coins_BK, numerator_BK, denominator_BK) & _is_draft(drafted)
    i_K = torch.arange(1, passes_BK.shape[1] + 1, device=passes_BK.device)
    longest_B = torch.where(passes_BK, i_K, 0)
    num_accepted_B = longest_B.amax(dim=1) if len(i_K) else drafted.num_drafts_B * 0
    return _decide(drafted, num_accepted_B, prefix_BQ)


RULES: dict[str, Callable[[Drafted, Tensor], Decision]] = {
    "rejection": rejection_accept,
    "block": block_accept,
}


def coins_pass(coins_BK: Tensor, numerator_BK: Tensor, denominator_BK: Tensor) -> Tensor:
    """Compare u with numerator / denominator, for u in (0, 1), in float64."""
    return coins_BK.double() * denominator_BK.double() < numerator_BK.double()


def prefix_probs(drafted: Drafted) -> Tensor:
    """Compute P_0..P_K, [B, Q]."""
    target_BK, draft_BK = drafted.of_drafts()
    prefix_B = torch.ones_like(drafted.target_probs_BQV[:, 0, 0])
    found = [prefix_B]
    for i in range(target_BK.shape[1]):
        weight_B = prefix_B * target_BK[:, i]
        # min(1, weight / q) without the quotient where it would be above 1
        draft_B = draft_BK[:, i]
        one_B = (weight_B > 0).to(weight_B)
        prefix_B = torch.where(weight_B >= draft_B, one_B, weight_B / draft_B)
        found.append(prefix_B)
    return torch.stack(found, dim=1)


def block_odds(drafted: Drafted, prefix_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each draft's coin is compared with, as numerator and denominator [B, K]."""
    K = drafted.draft_tokens_BK.shape[1]
    if K == 0:
        return prefix_BQ[:, 1:], prefix_BQ[:, 1:]
    rest_BKV = prefix_BQ[:, :K, None] * drafted.target_probs_BQV[:, :K] - drafted.draft_probs_BKV
    rest_BK = F.pad(sum_over_ids(rest_BKV.clamp(min=0), drafted.cut)[:, 1:, 0], (0, 1))
    prefix_BK = prefix_BQ[:, 1:]
    is_last_BK = torch.arange(1, K + 1, device=prefix_BQ.device) >= drafted.num_drafts_B[:, None]
    numerator_BK = torch.where(is_last_BK, prefix_BK, rest_BK)
    denominator_BK = torch.where(is_last_BK, 1, rest_BK + 1 - prefix_BK)
    # 0 / 0: target and draft agree on all that may follow, so nothing is left to draw instead
    is_certain_BK = denominator_BK == 0
    numerator_BK = torch.where(is_certain_BK, 1, numerator_BK)
    return numerator_BK, torch.where(is_certain_BK, 1, denominator_BK)


def _is_draft(drafted: Drafted) -> Tensor:
    K = drafted.draft_tokens_BK.shape[1]
    return torch.arange(K, device=drafted.num_drafts_B.device) < drafted.num_drafts_B[:, None]


def _decide(drafted: Drafted, num_accepted_B: Tensor, prefix_BQ: Tensor) -> Decision:
    """Decide by the count: the weights are the residual P p - q, or p after all drafts."""
    b = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    weights_BV = drafted.target_probs_BQV[b, num_accepted_B]
    is_bonus_B = num_accepted_B >= drafted.num_drafts_B
    K = drafted.draft_tokens_BK.shape[1]
    if K > 0:
        draft_BV = drafted.draft_probs_BKV[b, num_accepted_B.clamp(max=K - 1)]
        residual_BV = (prefix_BQ[b, num_accepted_B, None] * weights_BV - draft_BV).clamp(min=0)
        # where rounding left nothing, target and draft are equal
        is_target_B1 = is_bonus_B[:, None] | (greatest_over_ids(residual_BV, drafted.cut) == 0)
        weights_BV = torch.where(is_target_B1, weights_BV, residual_BV)
    return Decision(num_accepted_B=num_accepted_B, weights_BV=weights_BV, is_bonus_B=is_bonus_B)
