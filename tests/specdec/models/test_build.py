"""Caches on a CPU: zeros, whose memory is taken as it is written."""

from pathlib import Path

import pytest
import torch

from specdec.models.build import allocate_kv_cache, bytes_per_block
from specdec.sizes import BLOCK_SIZE
from tests.weights.tiny import tiny_target


def resident_bytes():
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_the_memory_that_is_written(dtype):
    heads = tiny_target("llama").config.heads
    num_blocks = (1 << 30) // bytes_per_block(heads, 2, dtype)
    before = resident_bytes()
    cache = allocate_kv_cache(heads, 2, num_blocks, dtype, torch.device("cpu"))
    G, C = heads.num_kv_heads, heads.head_dim
    assert cache.shape == (2, 2, num_blocks + 1, G, BLOCK_SIZE, C)
    assert cache.dtype == dtype
    assert not cache[:, :, -1].any()
    cache[1, 1, num_blocks // 2] = 1
    assert resident_bytes() - before < 1 << 24
