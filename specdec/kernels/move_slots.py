"""Copy keys and values of single cache slots, over all layers: cache[.., to] = cache[.., from].

Where either slot is -1 nothing moves. No slot is both read and written, and none is written twice.
"""

from torch import Tensor

from specdec.kernels import jit, launch_options, next_power_of_2, tl, use_triton
from specdec.kernels.overlap import begin

PARTS = 8  # keys or values of a layer that a program moves at once


def move_slots(kv_cache: Tensor, from_X: Tensor, to_X: Tensor) -> None:
    """kv_cache: [L, 2, N + 1, G, S, C]; the twin moves what does not move within block N."""
    if not use_triton(kv_cache):
        return move_slots_ref(kv_cache, from_X, to_X)
    L, _, blocks, G, S, C = kv_cache.shape
    block = min(next_power_of_2(G * C), 1024)
    sizes = {"G": G, "S": S, "C": C, "PARTS": PARTS, "BLOCK": block}
    options = {"num_warps": 4} | launch_options(kv_cache)
    grid = (len(from_X), -(-2 * L // PARTS))
    _move_slots_kernel[grid](kv_cache, from_X, to_X, 2 * L, blocks, **sizes, **options)


@jit(varying=("num_parts", "blocks"))
def _move_slots_kernel(
    cache_ptr,  # [2 L, blocks, G, S, C]
    from_ptr,  # [X]
    to_ptr,  # [X]
    num_parts,  # 2 L
    blocks,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    source = tl.load(from_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(to_ptr + tl.program_id(0)).to(tl.int64)
    if (source < 0) | (target < 0):
        return
    part = tl.program_id(1).to(tl.int64) * PARTS + tl.arange(0, PARTS)[:, None]
    part_ptr = cache_ptr + part * blocks * G * S * C
    for start in range(0, G * C, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        inside = (part < num_parts) & (i < G * C)
        within = i // C * S * C + i % C  # of the kv head and channel, in any block
        from_at = source // S * G * S * C + source % S * C
        to_at = target // S * G * S * C + target % S * C
        x = tl.load(part_ptr + from_at + within, mask=inside, other=0.0)
        tl.store(part_ptr + to_at + within, x, mask=inside)


def move_slots_ref(kv_cache: Tensor, from_X: Tensor, to_X: Tensor) -> None:
    S = kv_cache.shape[4]
    is_moved_X = (from_X >= 0) & (to_X >= 0)
    unused = (kv_cache.shape[2] - 1) * S
    source_X = from_X.where(is_moved_X, unused)
    target_X = to_X.where(is_moved_X, unused)
    moved = kv_cache[:, :, source_X // S, :, source_X % S]
    kv_cache[:, :, target_X // S, :, target_X % S] = moved
