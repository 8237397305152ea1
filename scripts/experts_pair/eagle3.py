"""An EAGLE-3 head (arXiv 2503.01840) as a torch module for training, by the reference's names.

Letters as in attention.py; T taps, and E their width together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.experts_pair.attention import Attention, Sizes

TAPS = (2, 4, 5)  # boundaries: the default of 8 layers


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(sizes.D, sizes.eps)
        self.input_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.self_attn = Attention(sizes, 2 * sizes.D, has_norms=False)
        self.post_attention_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.mlp = MLP(sizes.D, sizes.draft_I)

    def forward(
        self, embed_BSD: Tensor, hidden_BSD: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the stream to recycle.

        past: keys and values of the steps before, one for each row; this step's are appended
        """
        device, S = embed_BSD.device, embed_BSD.shape[1]
        x = torch.cat([self.input_layernorm(embed_BSD), self.hidden_norm(hidden_BSD)], -1)
        positions_S = torch.arange(S, device=device) + len(past)
        q, k, v = self.self_attn.rotated(x, positions_S)
        groups = q.shape[1] // k.shape[1]
        past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        out = attend(q, past)
        hidden_BSD = hidden_BSD + self.self_attn.o_proj(out.transpose(1, 2).flatten(2))
        return hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))


def attend(q_BHSC: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend to the rows of the first step up to one's own, and to one's own of later steps."""
    (k, v), *own = past
    S, C = q_BHSC.shape[-2:]
    is_future_SS = torch.ones(S, S, dtype=torch.bool, device=k.device).triu(1)
    q_BHSC = q_BHSC * C**-0.5
    scores = [(q_BHSC @ k.mT).float().masked_fill(is_future_SS, float("-inf"))]
    scores += [(q_BHSC.float() * k_own.float()).sum(-1, keepdim=True) for k_own, _ in own]
    probs = torch.cat(scores, -1).softmax(-1).to(v.dtype)
    out = probs[..., :S] @ v
    for i, (_, v_own) in enumerate(own):
        out = out + probs[..., S + i, None] * v_own
    return out


class Eagle3(nn.Module):
    """Begins as a head that repeats the mean of the taps. ids: the target's, of draft tokens."""

    def __init__(self, sizes: Sizes, ids_W: Tensor, embedding: Tensor, norm: Tensor) -> None:
        super().__init__()
        self.ids_W = ids_W
        self.fc = nn.Linear(len(TAPS) * sizes.D, sizes.D, bias=False)
        self.midlayer = MidLayer(sizes)
        self.norm = nn.RMSNorm(sizes.D, sizes.eps)
        self.lm_head = nn.Linear(sizes.D, len(ids_W), bias=False)
        for weight in (each for each in self.parameters() if each.dim() == 2):
            nn.init.normal_(weight, std=sizes.D**-0.5)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(sizes.D).repeat(1, len(TAPS)) / len(TAPS))
            self.midlayer.self_attn.o_proj.weight.zero_()
            self.midlayer.mlp.down_proj.weight.zero_()
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(embedding[ids_W])

    def forward(self, features_BSE: Tensor, embeds: list[Tensor]) -> list[Tensor]:
        """Return logits [B, S, W] of each step. embeds: of each step's tokens [B, S, D]."""
        hidden, past, logits = self.fc(features_BSE).float(), [], []
        for embed_BSD in embeds:
            hidden = self.midlayer(embed_BSD, hidden, past)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def published(self, num_ids: int) -> dict[str, Tensor]:
        """Name the weights as the reference does; d2t: offsets, t2d: which ids there are."""
        found = {
            name: t.detach().to("cpu", torch.bfloat16) for name, t in self.state_dict().items()
        }
        ids_W = self.ids_W.cpu()
        covered_V = torch.zeros(num_ids, dtype=torch.bool).index_fill(0, ids_W, True)
        return found | {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": covered_V}
