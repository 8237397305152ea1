"""Which drafts hold. A draft token is accepted if and only if it is the target's own choice at its position.

So the tokens of a round are the target's choices up to the first draft that differs, whatever the draft proposed.
"""

import torch
from torch import Tensor


def greedy_accept(target_tokens_BQ: Tensor, draft_tokens_BK: Tensor, num_valid_B: Tensor) -> Tensor:
    """Keep draft tokens while they equal the target's choice; the target's next choice follows them.

    target_tokens_BQ: the target's choice behind each of the K+1 verified rows
    draft_tokens_BK:  what the draft proposed
    num_valid_B:      rows that are not padding; the draft in a padded row is never accepted
    Returns num_accepted_B, 0..K.
    """
    K = draft_tokens_BK.shape[1]
    row_K = torch.arange(1, K + 1, device=draft_tokens_BK.device)
    holds_BK = (target_tokens_BQ[:, :K] == draft_tokens_BK) & (row_K < num_valid_B[:, None])
    return holds_BK.cumprod(dim=1).sum(dim=1)
