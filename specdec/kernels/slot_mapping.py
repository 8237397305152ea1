"""slot = block_table[row, position // S] * S + position % S; -1 where `is_valid` is false."""

import torch
from torch import Tensor

PAD_SLOT = -1


def slot_mapping_ref(
    positions: Tensor, rows: Tensor, block_table: Tensor, block_size: int, is_valid: Tensor
) -> Tensor:
    """Cache slots of any shape of positions and state rows [...]; block_table [R + 1, M]."""
    block = block_table[rows, torch.where(is_valid, positions // block_size, 0)]
    return torch.where(is_valid, block * block_size + positions % block_size, PAD_SLOT)
