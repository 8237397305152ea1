"""What happens to logits before a token is chosen, for every verified row at its own position. Fixed shapes."""

import torch
from torch import Tensor

MAX_STOP_IDS = 64  # ids that min_tokens can mask, per request


def mask_stop_tokens(logits_TV: Tensor, positions_T: Tensor, min_positions_T: Tensor, stop_ids_TP: Tensor) -> None:
    """min_tokens: where the drawn token would stand before min_positions, the stop ids become -inf, in place.

    positions_T: of the row, whose drawn token stands one behind. stop_ids_TP: padded by repeating an id of the row.
    """
    is_early_T1 = (positions_T + 1 < min_positions_T)[:, None]
    kept_TP = logits_TV.gather(1, stop_ids_TP)
    logits_TV.scatter_(1, stop_ids_TP, torch.where(is_early_T1, -torch.inf, kept_TP))
