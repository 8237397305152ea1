"""The fastest attention that can be installed, over contiguous keys; the suite attention uses it.

Nothing of specdec is imported here, so that no yardstick can be the shipped kernel. Each one takes
q [B, H, Q, C], k and v [B, G, L, C], where the queries are the last Q of L positions, and returns a
call that computes [B, H, Q, C]. What a device or a shape does not allow raises RuntimeError.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Call = Callable[[], Tensor]
Yardstick = Callable[[Tensor, Tensor, Tensor], Call]


def yardsticks(device: torch.device) -> dict[str, Yardstick]:
    """By name, those that this machine has."""
    if device.type != "cuda":
        return {"math": partial(masked, SDPBackend.MATH), "flex": flex}
    found: dict[str, Yardstick] = {
        "flash": flash,
        "flash_packed": flash_packed,
        "cudnn": partial(masked, SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
    }
    if find_spec("flash_attn_interface") is not None:
        found["flash_3"] = flash_3
    return found


def flash(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """torch's FlashAttention 2."""
    Q, L = q.shape[2], k.shape[2]
    if 1 < Q < L:
        bias = causal_lower_right(Q, L)
        return partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, k, v, attn_mask=bias)
    return partial(_sdpa, SDPBackend.FLASH_ATTENTION, q, k, v, is_causal=Q > 1)


def flash_packed(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The heads of a group and all queries as rows of one head, without a mask.

    Keys are read once for all of them. Of several rows all but the last see a few keys too many.
    """
    if q.shape[2] == k.shape[2] > 1:
        raise RuntimeError("a prompt needs a mask")
    packed = _packed(q, k)
    return lambda: _sdpa(SDPBackend.FLASH_ATTENTION, packed, k, v).view(q.shape)


def masked(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """torch's other kernels: a prompt causally, a few rows packed, with their mask written out."""
    Q, L = q.shape[2], k.shape[2]
    if Q == L:
        return partial(_sdpa, backend, q, k, v, is_causal=True)
    packed = _packed(q, k)
    is_seen = torch.ones(Q, L, dtype=torch.bool, device=q.device).tril(L - Q)
    mask = is_seen.repeat(packed.shape[2] // Q, 1) if Q > 1 else None
    return lambda: _sdpa(backend, packed, k, v, attn_mask=mask).view(q.shape)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """flex_attention, compiled on a GPU."""
    Q, L = q.shape[2], k.shape[2]
    first = torch.tensor(L - Q, device=q.device)

    def is_seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + first >= j

    mask = create_block_mask(is_seen, None, None, Q, L, device=str(q.device))
    attend = _compiled_flex() if q.is_cuda else partial(flex_attention)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)


def flash_3(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """FlashAttention 3 by its own package, whose layout is [B, length, heads, C]."""
    from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[1] == k.shape[1]:
        attend = partial(flash_attn_func, q, k, v, causal=True)
    else:
        lengths = torch.full((len(k),), k.shape[1], dtype=torch.int32, device=k.device)
        attend = partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True)

    def call() -> Tensor:
        found = attend()
        # some versions return the normalizers too
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return call


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    with sdpa_kernel(backend):
        out: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # type: ignore[arg-type]
    return out


def _packed(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, Q, C] to [B, G, H / G x Q, C]."""
    B, _, _, C = q.shape
    return q.reshape(B, k.shape[1], -1, C)


@cache
def _compiled_flex() -> partial[Tensor]:
    return partial(torch.compile(flex_attention, dynamic=True))
