"""The paged KV cache of one model: one tensor for all layers, with a scratch block for padding."""

import torch
from torch import Tensor

from specdec.sizes import BLOCK_SIZE
from weights.config import LayerConfig


def allocate_kv_cache(
    layer: LayerConfig, num_layers: int, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[L, 2, N + 1, G, S, C]: keys and values of every layer; block N is scratch."""
    shape = (num_layers, 2, num_blocks + 1, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def bytes_per_block(layer: LayerConfig, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers of one model, keys and values."""
    return num_layers * 2 * layer.num_kv_heads * BLOCK_SIZE * layer.head_dim * dtype.itemsize
