"""A DSpark head (arXiv 2607.05147) as a torch module for training, by DeepSpec's names.

All rows of a batch have blocks at the same places, which makes their positions and their masks one.
Letters: B sequences, S tokens, D hidden, V vocabulary, H query heads, C channels, E width of the
taps together, A anchors of a sequence, R rows of a block.
"""

import torch
from torch import Tensor, nn

from scripts.experts_pair.attention import Attention, Sizes
from scripts.experts_pair.eagle3 import MLP

SIZES = Sizes(D=256, E=0, I=768, draft_I=384, eps=1e-5)  # of the bundled target and this head
TAPS = (1, 3, 5, 7, 8)  # boundaries
NUM_LAYERS, BLOCK, RANK = 3, 8, 64
MASK = 0  # <|bos|>, which is never the token to propose after


class BlockLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.self_attn = Attention(sizes, sizes.D, has_norms=True)
        self.post_attention_layernorm = nn.RMSNorm(sizes.D, sizes.eps)
        self.mlp = MLP(sizes.D, sizes.draft_I)

    def forward(self, x_BARD: Tensor, context_BSD: Tensor, anchors_A: Tensor) -> Tensor:
        out_BARD = attend(self.self_attn, self.input_layernorm(x_BARD), context_BSD, anchors_A)
        x_BARD = x_BARD + out_BARD
        return x_BARD + self.mlp(self.post_attention_layernorm(x_BARD))


def attend(attention: Attention, x_BARD: Tensor, context_BSD: Tensor, anchors_A: Tensor) -> Tensor:
    """Let rows see the context before their anchor, and all rows of their block."""
    (_, A, R, _), S = x_BARD.shape, context_BSD.shape[1]
    places_R = torch.arange(R, device=x_BARD.device)
    places_S = torch.arange(S, device=x_BARD.device)
    places = (anchors_A[:, None] + places_R).flatten()
    q, k, v = attention.rotated(x_BARD.flatten(1, 2), places)
    _, past_k, past_v = attention.rotated(context_BSD, places_S)
    groups = q.shape[1] // k.shape[1]
    k, v, past_k, past_v = (x.repeat_interleave(groups, 1) for x in (k, v, past_k, past_v))
    q, k, v = (x.unflatten(2, (A, R)) for x in (q * q.shape[-1] ** -0.5, k, v))
    past = (q.flatten(2, 3) @ past_k.mT).unflatten(2, (A, R)).float()
    is_later_AS = places_S >= anchors_A[:, None]
    past = past.masked_fill(is_later_AS[:, None], float("-inf"))
    probs = torch.cat([past, (q @ k.mT).float()], -1).softmax(-1).to(v.dtype)
    of_past = (probs[..., :S].flatten(2, 3) @ past_v).unflatten(2, (A, R))
    out_BHARC = of_past + probs[..., S:] @ v
    return attention.o_proj(out_BHARC.permute(0, 2, 3, 1, 4).flatten(3))


class DSpark(nn.Module):
    """Begins with the mean of the taps as context, and without a markov bias.

    embedding, norm: the target's; its embedding is its head as well
    """

    embedding_VD: Tensor

    def __init__(self, sizes: Sizes, embedding_VD: Tensor, norm_D: Tensor) -> None:
        super().__init__()
        D, V = sizes.D, sizes.V
        self.register_buffer("embedding_VD", embedding_VD, persistent=False)
        self.fc = nn.Linear(len(TAPS) * D, D, bias=False)
        self.hidden_norm = nn.RMSNorm(D, sizes.eps)
        self.layers = nn.ModuleList(BlockLayer(sizes) for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(D, sizes.eps)
        self.markov_head = nn.ModuleDict(
            {"markov_w1": nn.Embedding(V, RANK), "markov_w2": nn.Linear(RANK, V, bias=False)}
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(D + RANK, 1)})
        for weight in (each for each in self.parameters() if each.dim() == 2):
            nn.init.normal_(weight, std=D**-0.5)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(D).repeat(1, len(TAPS)) / len(TAPS))
            self.norm.weight.copy_(norm_D / 2)  # sure of nothing yet
            nn.init.normal_(self.markov_head["markov_w1"].weight, std=0.5)
            self.markov_head["markov_w2"].weight.zero_()

    def rows(self, features_BSE: Tensor, anchor_BA: Tensor, anchors_A: Tensor, R: int) -> Tensor:
        """Return what blocks have for the head [B, A, R, D]. anchor: the tokens at anchors"""
        ids_BAR = torch.cat(
            [anchor_BA[..., None], anchor_BA.new_full((*anchor_BA.shape, R - 1), MASK)], -1
        )
        x_BARD, context_BSD = self.embedding_VD[ids_BAR], self.hidden_norm(self.fc(features_BSE))
        for layer in self.layers:
            x_BARD = layer(x_BARD, context_BSD, anchors_A)
        return self.norm(x_BARD)

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return logits [..., V] of rows [..., D] after the tokens before."""
        bias = self.markov_head["markov_w2"](self.markov_head["markov_w1"](before))
        return nn.functional.linear(hidden, self.embedding_VD) + bias

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what the sigmoid of is how likely drafts hold."""
        read = torch.cat([hidden, self.markov_head["markov_w1"](before)], -1).detach()
        return self.confidence_head["proj"](read)[..., 0]

    def published(self) -> dict[str, Tensor]:
        return {name: t.detach().to("cpu", torch.bfloat16) for name, t in self.state_dict().items()}
