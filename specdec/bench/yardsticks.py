"""The fastest attention that torch has, over contiguous keys, for the suite exactness.

Nothing of specdec is imported here, so that no yardstick can be the shipped kernel. Each one takes
q [B, H, Q, C] and k [B, G, L, C] for their shapes, makes what these need, such as a mask, and
returns a call that computes [B, H, Q, C] from q, k and v of these shapes, where the queries are the
last Q of L positions. What a device or a shape does not allow raises RuntimeError in either.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Yardstick = Callable[[Tensor, Tensor], Attend]


def yardsticks(device: torch.device) -> dict[str, Yardstick]:
    """List those that this machine has, by name."""
    if device.type != "cuda":
        return {"math": partial(masked, SDPBackend.MATH), "flex": flex}
    return {
        "flash": flash,
        "flash_packed": flash_packed,
        "cudnn": partial(masked, SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
    }


def first_line(error: Exception) -> str:
    """Say in a row's cell why a yardstick is not possible."""
    return str(error).strip().partition("\n")[0][:100] or type(error).__name__


def flash(q: Tensor, k: Tensor) -> Attend:
    """Run torch's FlashAttention 2."""
    Q, L = q.shape[2], k.shape[2]
    if 1 < Q < L:
        bias = causal_lower_right(Q, L)
        return partial(_sdpa, SDPBackend.FLASH_ATTENTION, attn_mask=bias)
    return partial(_sdpa, SDPBackend.FLASH_ATTENTION, is_causal=Q > 1)


def flash_packed(q: Tensor, k: Tensor) -> Attend:
    """The heads of a group and all queries as rows of one head, without a mask.

    Keys are read once for all of them. Of several rows all but the last see a few keys too many.
    """
    if q.shape[2] == k.shape[2] > 1:
        raise RuntimeError("a prompt needs a mask")
    return partial(_packed, SDPBackend.FLASH_ATTENTION)


def masked(backend: SDPBackend, q: Tensor, k: Tensor) -> Attend:
    """torch's other kernels: a prompt causally, a few rows packed, with their mask written out."""
    Q, L = q.shape[2], k.shape[2]
    if Q == L:
        return partial(_sdpa, backend, is_causal=True)
    is_seen = torch.ones(Q, L, dtype=torch.bool, device=q.device).tril(L - Q)
    mask = is_seen.repeat(q.shape[1] // k.shape[1], 1) if Q > 1 else None
    return partial(_packed, backend, attn_mask=mask)


def flex(q: Tensor, k: Tensor) -> Attend:
    """flex_attention, compiled on a GPU."""
    Q, L = q.shape[2], k.shape[2]
    first = torch.tensor(L - Q, device=q.device)

    def is_seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + first >= j

    mask = create_block_mask(is_seen, None, None, Q, L, device=str(q.device))
    attend = _compiled_flex() if q.is_cuda else flex_attention
    return partial(attend, block_mask=mask, enable_gqa=True)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    with sdpa_kernel(backend):
        out: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # type: ignore[arg-type]
    return out


def _packed(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """With queries [B, G, H / G x Q, C]."""
    B, G, _, C = k.shape
    return _sdpa(backend, q.reshape(B, G, -1, C), k, v, **options).reshape(q.shape)


@cache
def _compiled_flex() -> partial[Tensor]:
    return partial(torch.compile(flex_attention, dynamic=True))
