"""Every EAGLE draft as one module; EagleConfig (weights/config.py) has the formulas.

A row takes a token and a feature: the target's, by `features`, or the draft's own last stream.
Letters: T rows, D draft hidden, E width of the target's features, W draft vocabulary.
"""

import torch
from torch import Tensor, nn

from specdec.kernels.add import add
from specdec.kernels.linear import Sums
from specdec.models.layers import MLP, Attention, Embedding, Linear, RMSNorm
from weights.config import EagleConfig


class EagleLayer(nn.Module):
    """A decoder layer; the first of a "qkv" draft reads concat(embedding, feature)."""

    def __init__(self, config: EagleConfig, index: int, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        D = config.layer.hidden_size
        eps = config.layer.rms_norm_eps
        is_first = index == 0
        self.is_wide = is_first and config.entry == "qkv"
        self.norm_before_residual = config.norm_before_residual
        has_input_norm = config.has_input_layernorm or not is_first
        self.input_layernorm = RMSNorm(D, eps) if has_input_norm else None
        self.hidden_norm = RMSNorm(D, eps) if self.is_wide and config.has_hidden_norm else None
        self.self_attn = Attention(config.layer, index, rope, 2 * D if self.is_wide else D)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = MLP(config.layer)

    def forward(self, x: Tensor | Sums, stream_TD: Tensor, embed_TD: Tensor) -> tuple[Sums, Tensor]:
        """x: the features, after the first layer its last product. Returns the next such pair."""
        u_TD, stream_TD = self.enter(x, stream_TD, embed_TD)
        normed_TD, stream_TD = self.post_attention_layernorm.add(self.self_attn(u_TD), stream_TD)
        return self.mlp(normed_TD), stream_TD

    def enter(self, x: Tensor | Sums, stream_TD: Tensor, embed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the stream beside it."""
        if isinstance(x, Sums):
            assert self.input_layernorm is not None, "only a first layer may lack it"
            return self.input_layernorm.add(x, stream_TD)
        if not self.is_wide:
            return x if self.input_layernorm is None else self.input_layernorm(x), x
        embed_TD = embed_TD if self.input_layernorm is None else self.input_layernorm(embed_TD)
        g_TD = x if self.hidden_norm is None else self.hidden_norm(x)
        return torch.cat([embed_TD, g_TD], dim=-1), g_TD if self.norm_before_residual else x


class EagleModel(nn.Module):
    def __init__(self, config: EagleConfig, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        D = config.layer.hidden_size
        Dt = config.target_hidden_size
        eps = config.layer.rms_norm_eps
        taps = max(len(config.aux_boundaries), 1)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, D)
        self.embed_norm = RMSNorm(D, eps) if config.has_embed_norm else None
        self.input_norm = RMSNorm(taps * Dt, eps) if config.norm_before_fc else None
        fc_norms = (RMSNorm(Dt, eps) for _ in range(taps))
        self.fc_norm = nn.ModuleList(fc_norms) if config.has_fc_norm else None
        fc_in = D + Dt if config.entry == "fc" else taps * Dt
        self.fc = Linear(fc_in, D, config.fc_bias) if config.has_fc else None
        self.layers = nn.ModuleList(EagleLayer(config, i, rope) for i in range(config.num_layers))
        self.norm = RMSNorm(D, eps) if config.has_final_norm else None
        self.lm_head = Embedding(config.draft_vocab_size, D)  # never run: see stepping/propose.py

    def features(self, features_TE: Tensor) -> Tensor:
        """The target's features as the draft's rows take them, [T, D]; not for recycled streams."""
        if self.fc_norm is not None:
            taps = features_TE.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            features_TE = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            features_TE = self.input_norm(features_TE)
        if self.config.entry == "qkv" and self.fc is not None:
            features_TE = self.fc(features_TE)
        return features_TE

    def extend(self, input_ids_T: Tensor, g_TD: Tensor) -> None:
        """Cache the keys and values of `forward`: of one layer, they need no attention and MLP."""
        if len(self.layers) > 1:
            self(input_ids_T, g_TD)
            return
        x, embed_TD = self._first(input_ids_T, g_TD)
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer), layer
        u_TD, _ = layer.enter(x, g_TD, embed_TD)
        layer.self_attn.store(u_TD)

    def _first(self, input_ids_T: Tensor, g_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer takes, and the embeddings beside it."""
        embed_TD = self.embed_tokens(input_ids_T)
        if self.embed_norm is not None:
            embed_TD = self.embed_norm(embed_TD)
        if self.config.entry == "fc" and self.fc is not None:
            return self.fc(torch.cat([embed_TD, g_TD], dim=-1)), embed_TD
        return g_TD, embed_TD

    def forward(self, input_ids_T: Tensor, g_TD: Tensor) -> tuple[Sums, Tensor]:
        """The last product and the stream to add it to. g_TD: features or recycled streams."""
        x: Tensor | Sums
        x, embed_TD = self._first(input_ids_T, g_TD)
        stream_TD = g_TD
        for layer in self.layers:
            x, stream_TD = layer(x, stream_TD, embed_TD)
        assert isinstance(x, Sums)
        return x, stream_TD

    def head_input(self, stream_XD: Tensor) -> tuple[Tensor, Tensor]:
        """What the head multiplies, and the next row's feature, from finished streams [X, D]."""
        normed_XD = stream_XD if self.norm is None else self.norm(stream_XD)
        return normed_XD, normed_XD if self.config.recycled == "post_norm" else stream_XD

    def next_level(self, input_ids_B: Tensor, g_BD: Tensor) -> tuple[Tensor, Tensor]:
        """One row per request on the draft's own streams; returns the same two as `head_input`."""
        x, stream_BD = self(input_ids_B, g_BD)
        if self.norm is None:
            out_BD = torch.empty_like(stream_BD)
            add(x, stream_BD, out_BD)
            return out_BD, out_BD
        normed_BD, stream_BD = self.norm.add(x, stream_BD)
        return normed_BD, normed_BD if self.config.recycled == "post_norm" else stream_BD
