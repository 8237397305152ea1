"""Write keys and values of the step into the paged cache. Slot -1 (padding) writes nothing that anyone reads.

Cache of one layer: [2, N + 1, G, S, C], keys then values; the last block is scratch, to which the twin sends padding.
"""

import torch
from torch import Tensor


def store_kv(k_TGC: Tensor, v_TGC: Tensor, cache: Tensor, slot_mapping_T: Tensor) -> None:
    """cache [2, N + 1, G, S, C] is written in place at slot_mapping_T (block x S + offset, -1 = padding)."""
    store_kv_ref(k_TGC, v_TGC, cache, slot_mapping_T)


def store_kv_ref(k_TGC: Tensor, v_TGC: Tensor, cache: Tensor, slot_mapping_T: Tensor) -> None:
    _, N, _, S, _ = cache.shape
    slot_T = torch.where(slot_mapping_T < 0, (N - 1) * S, slot_mapping_T)
    block_T, offset_T = slot_T // S, slot_T % S
    cache[0].transpose(1, 2)[block_T, offset_T] = k_TGC
    cache[1].transpose(1, 2)[block_T, offset_T] = v_TGC
