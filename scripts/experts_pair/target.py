"""A target as a torch module for training: Qwen3-MoE's arithmetic, or Llama's without experts.

All experts compute for all rows, as one product: with 16 small ones this is faster than choosing
rows, and the weights of those not chosen are 0. Letters as in attention.py.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.experts_pair.attention import Attention, Cache, Sizes
from scripts.experts_pair.eagle3 import MLP


class Experts(nn.Module):
    """A router in float32, and all experts side by side in two products."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate = nn.Linear(sizes.D, sizes.E, bias=False)
        self.gate_proj = nn.Linear(sizes.D, sizes.E * sizes.I, bias=False)
        self.up_proj = nn.Linear(sizes.D, sizes.E * sizes.I, bias=False)
        self.down_proj = nn.Linear(sizes.E * sizes.I, sizes.D, bias=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is added to the stream, the imbalance (1: none), and each expert's share."""
        with torch.autocast(x_BSD.device.type, enabled=False):
            probs = F.linear(x_BSD.float(), self.gate.weight).softmax(-1)
        best, ids = probs.topk(self.sizes.chosen)
        weights = torch.zeros_like(probs).scatter(-1, ids, best / best.sum(-1, keepdim=True))
        share_E = (weights > 0).float().mean((0, 1)) / self.sizes.chosen
        imbalance = self.sizes.E * (share_E.detach() * probs.mean((0, 1))).sum()
        h = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        h = h.unflatten(-1, (self.sizes.E, -1)) * weights[..., None].to(h.dtype)
        return self.down_proj(h.flatten(-2)), imbalance, share_E


class Dense(MLP):
    """An MLP that is used in full, as the only expert would be."""

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x_BSD), x_BSD.new_ones(()), x_BSD.new_ones(1)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.self_attn = Attention(sizes, sizes.D, has_norms=sizes.E > 0)
        self.post_attention_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.mlp = Experts(sizes) if sizes.E else Dense(sizes.D, sizes.I)

    def forward(
        self, x_BSD: Tensor, start: int, cache: Cache | None, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the stream, and of the experts the imbalance and each one's share."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), start, cache, layer)
        added, imbalance, share_E = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + added, imbalance, share_E


class Target(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.V, sizes.D)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.L))
        self.norm = nn.RMSNorm(sizes.D, sizes.eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = sizes.D**-0.5 * (0.5 / sizes.L**0.5 if adds else 1.0)
                nn.init.normal_(weight, std=0.02 if "embed" in name else scale)

    def forward(
        self, tokens_BS: Tensor, start: int = 0, cache: Cache | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the L + 1 boundaries [B, S, D], the mean imbalance, and shares [L, E].

        start: the position of the first token; cache: keys and values of tokens before it
        """
        boundaries, of_experts = [self.embed_tokens(tokens_BS)], []
        for i, layer in enumerate(self.layers):
            stream, *found = layer(boundaries[-1], start, cache, i)
            boundaries.append(stream)
            of_experts.append(found)
        imbalances, shares = zip(*of_experts, strict=True)
        return boundaries, torch.stack(imbalances).mean(), torch.stack(shares)

    def logits(self, stream_BSD: Tensor) -> Tensor:
        return F.linear(self.norm(stream_BSD), self.embed_tokens.weight)

    def published(self) -> dict[str, Tensor]:
        """Name the weights as Qwen3-MoE's files do, in bfloat16."""
        found = {}
        for name, weight in self.state_dict().items():
            for part, view in self._parts(name, weight.detach().to("cpu", torch.bfloat16)):
                found[part] = view.contiguous()
        return found

    @torch.no_grad()
    def adopt(self, published: dict[str, Tensor]) -> None:
        """Take over weights that `published` named."""
        for name, weight in self.state_dict().items():
            for part, view in self._parts(name, weight):
                view.copy_(published[part])

    def _parts(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give the names in files, and views."""
        before, _, role = name.rpartition(".mlp.")
        if role == "gate.weight" or not before or not self.sizes.E:
            yield f"model.{name}", weight
            return
        views = weight.chunk(self.sizes.E, dim=1 if role.startswith("down") else 0)
        for e, view in enumerate(views):
            yield f"model.{before}.mlp.experts.{e}.{role}", view
