"""Sizes of a target and its head, by default of the pair with experts, and the attention of both.

Letters: B sequences, S tokens, D hidden, X what attention reads, H query heads, G kv heads, C
channels, V vocabulary, W draft vocabulary, L layers, E experts, I width of each.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]  # keys and values [B, G, S, C] of each layer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes; both files of the bundled pair with experts have less than 8 MB in bfloat16.

    E = 0: no experts, and no norms over heads in the target, as Llama has it
    """

    V: int = 4096
    D: int = 192
    L: int = 8
    H: int = 4
    G: int = 2
    C: int = 64
    E: int = 16
    I: int = 16
    chosen: int = 4
    W: int = 1024
    draft_I: int = 384
    eps: float = 1e-6
    theta: float = 10000.0


class Attention(nn.Module):
    """Causal attention with a norm for each head. width: of what it reads."""

    def __init__(self, sizes: Sizes, width: int, has_norms: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(width, sizes.H * sizes.C, bias=False)
        self.k_proj = nn.Linear(width, sizes.G * sizes.C, bias=False)
        self.v_proj = nn.Linear(width, sizes.G * sizes.C, bias=False)
        self.o_proj = nn.Linear(sizes.H * sizes.C, sizes.D, bias=False)
        if has_norms:
            self.q_norm = nn.RMSNorm(sizes.C, sizes.eps)
            self.k_norm = nn.RMSNorm(sizes.C, sizes.eps)

    def rotated(self, x_BSX: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, S, C], keys and values [B, G, S, C]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BSX).unflatten(-1, (-1, self.sizes.C)).transpose(1, 2) for p in projections)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        half = torch.arange(0, self.sizes.C, 2, device=q.device) / self.sizes.C
        angles_SC = torch.outer(positions_S.float(), self.sizes.theta**-half).repeat(1, 2)
        cos, sin = angles_SC.cos(), angles_SC.sin()
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def forward(self, x_BSD: Tensor, start: int, cache: Cache | None, layer: int) -> Tensor:
        positions = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device)
        q, k, v = self.rotated(x_BSD, positions)
        if cache is not None:
            for kept, new in zip(cache[layer], (k, v), strict=True):
                kept[:, :, start : start + new.shape[2]] = new
            k, v = (kept[:, :, : start + q.shape[2]] for kept in cache[layer])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_SC + torch.cat([-second, first], -1) * sin_SC
