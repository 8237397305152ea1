"""The parts of a Llama-shaped decoder layer, shared by target and draft. Attribute names are the checkpoint's.

Every product, norm and activation goes through specdec.kernels, whose rows do not depend on their neighbours.
Letters: T rows, D hidden, H query heads, G kv heads, C channels per head, I mlp width.
"""

import torch
from torch import Tensor, nn

from specdec.attention import attend, store_kv
from specdec.kernels.linear import linear
from specdec.kernels.rms_norm import rms_norm
from specdec.kernels.rotary import rotary
from specdec.kernels.silu_mul import silu_mul
from weights.config import LayerConfig


class Linear(nn.Module):
    """A row-invariant product with an optional bias."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None

    def forward(self, x_TD: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear(x_TD, self.weight, self.bias, out_dtype)


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width), requires_grad=False)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight[ids_T]


class RMSNorm(nn.Module):
    """Norm of x, or of x + residual; returns the norm and the stream it read."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(x_TD, self.weight, self.eps, residual_TD)


class Attention(nn.Module):
    """Self-attention over the paged cache; `num_in` differs from D in the first layer of an EAGLE-3 draft."""

    def __init__(self, config: LayerConfig, index: int, rope: tuple[Tensor, Tensor], num_in: int) -> None:
        super().__init__()
        H, G, C = config.num_heads, config.num_kv_heads, config.head_dim
        self.index, self.rope, self.heads = index, rope, (H, G, G)
        self.head_dim = C
        self.qkv_proj = Linear(num_in, (H + 2 * G) * C, config.qkv_bias)
        self.o_proj = Linear(H * C, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(C, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(C, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        T = len(x_TD)
        q, k, v = self.qkv_proj(x_TD).view(T, -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        q, k = rotary(q, positions_T, *self.rope), rotary(k, positions_T, *self.rope)
        store_kv(k, v, self.index)
        out = torch.empty_like(q)
        attend(q, out, self.index)
        projected_TD: Tensor = self.o_proj(out.view(T, -1))
        return projected_TD


class MLP(nn.Module):
    """SwiGLU over one fused gate and up product."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        down_TD: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x_TD)))
        return down_TD
