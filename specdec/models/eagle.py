"""Every EAGLE draft as one module; EagleConfig (weights/draft/config.py) has the formulas.

A row takes a token and a feature: the target's, by `features`, or the draft's own last stream.
Letters: T rows, D draft hidden, E width of the target's features, W draft vocabulary.
"""

import torch
from torch import Tensor, nn

from specdec.kernels.joint_input import JointNorms, joint_input, joint_input_of_rows
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add
from specdec.models.layers import (
    MLP,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    embedding,
    reads_all,
    reads_share,
)
from specdec.parallel.exchange import Exchange
from weights.draft.config import EagleConfig


class EagleLayer(nn.Module):
    """A decoder layer; the first of a "qkv" draft reads concat(embedding, feature)."""

    def __init__(
        self,
        config: EagleConfig,
        index: int,
        rope: tuple[Tensor, Tensor],
        exchange: Exchange | None,
    ) -> None:
        super().__init__()
        D = config.layer.hidden_size
        eps = config.layer.rms_norm_eps
        is_first = index == 0
        self.is_wide = is_first and config.entry == "qkv"
        self.norm_before_residual = config.norm_before_residual
        has_input_norm = config.has_input_layernorm or not is_first
        self.input_layernorm = RMSNorm(D, eps, reads_all(exchange)) if has_input_norm else None
        self.hidden_norm = RMSNorm(D, eps) if self.is_wide and config.has_hidden_norm else None
        num_in = 2 * D if self.is_wide else D
        self.self_attn = Attention(config.layer, index, rope, num_in, exchange)
        self.post_attention_layernorm = RMSNorm(D, eps, reads_share(exchange))
        self.mlp = MLP(config.layer, exchange)

    def forward(
        self, u_TD: Tensor, stream_TD: Tensor, rows_X: Tensor | None = None
    ) -> tuple[Sums, Tensor]:
        """Run the layer on u, what attention reads; return the last product and its stream.

        rows: those that the results have, while keys and values of all are cached; None: all
        """
        q_THC = self.self_attn.store(u_TD)
        sums, stream_XD = self.self_attn.finish(q_THC, stream_TD, rows_X)
        normed_XD, stream_XD = self.post_attention_layernorm.add(sums, stream_XD)
        return self.mlp(normed_XD), stream_XD

    def enter(self, x_TD: Tensor, embed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads in a first layer, from features, and the stream beside it."""
        if not self.is_wide:
            return x_TD if self.input_layernorm is None else self.input_layernorm(x_TD), x_TD
        embed_TD = embed_TD if self.input_layernorm is None else self.input_layernorm(embed_TD)
        g_TD = x_TD if self.hidden_norm is None else self.hidden_norm(x_TD)
        return torch.cat([embed_TD, g_TD], dim=-1), g_TD if self.norm_before_residual else x_TD


class EagleModel(nn.Module):
    """A draft, or a rank's part of it. config: of the whole; exchange: as DecoderModel has it."""

    def __init__(
        self, config: EagleConfig, rope: tuple[Tensor, Tensor], exchange: Exchange | None = None
    ) -> None:
        super().__init__()
        D = config.layer.hidden_size
        Dt = config.target_hidden_size
        eps = config.layer.rms_norm_eps
        taps = max(len(config.aux_boundaries), 1)
        self.config = config
        self.is_cut = exchange is not None
        self.embed_tokens = embedding(config.vocab_size, D, exchange)
        self.embed_norm = RMSNorm(D, eps) if config.has_embed_norm else None
        self.feature_norm = RMSNorm(Dt, eps) if config.has_feature_norm else None
        self.input_norm = RMSNorm(taps * Dt, eps) if config.norm_before_fc else None
        fc_norms = (RMSNorm(Dt, eps) for _ in range(taps))
        self.fc_norm = nn.ModuleList(fc_norms) if config.has_fc_norm else None
        fc_in = D + Dt if config.entry == "fc" else taps * Dt
        self.fc = Linear(fc_in, D, config.fc_bias) if config.has_fc else None
        numbers = range(config.num_layers)
        self.layers = nn.ModuleList(EagleLayer(config, i, rope, exchange) for i in numbers)
        self.norm = RMSNorm(D, eps, reads_all(exchange)) if config.has_final_norm else None
        self._add = add if exchange is None else exchange.add
        W = config.draft_vocab_size
        rows = W if exchange is None else len(exchange.shard.ids_of(W))
        self.lm_head = Embedding(rows, D)  # never run: see rounds/propose.py
        self.logits_factor = 1.0  # a borrowed head has the target's
        self.mask_feature_1D: Tensor | None = None  # of a parallel draft: see set_mask

    def set_mask(self, mask_hidden: Tensor) -> None:
        """Prepare what mask rows take in place of the target's features [1, 1, E], once."""
        self.mask_feature_1D = self.features(mask_hidden[0])

    def features(self, features_TE: Tensor) -> Tensor:
        """Prepare the target's features for the draft's rows, [T, D]; not recycled streams."""
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
        """Cache the keys and values of `forward`: one layer needs no attention and MLP for it."""
        if not self.has_one_layer:
            self(input_ids_T, g_TD)
            return
        u_TD, _ = self._enter(input_ids_T, g_TD, None)
        self._first.self_attn.store(u_TD, has_queries=False)

    def forward(
        self,
        input_ids_T: Tensor,
        g_XD: Tensor,
        rows_T: Tensor | None = None,
        seeds_B: Tensor | None = None,
    ) -> tuple[Sums, Tensor]:
        """Return the last product and the stream to add it to, of all rows or of the seeds.

        g: features or recycled streams. rows: of g, one for each token; None: all, in order
        seeds: rows after which tokens are proposed; of the others the last layer caches keys and
            values alone. None: all
        """
        u_TD, stream_TD = self._enter(input_ids_T, g_XD, rows_T)
        first, *others = self.layers
        x, stream_TD = first(u_TD, stream_TD, None if others else seeds_B)
        for layer in others:
            assert isinstance(layer, EagleLayer), layer
            assert layer.input_layernorm is not None, "only a first layer may lack it"
            wanted_B = seeds_B if layer is others[-1] else None
            x, stream_TD = layer(*layer.input_layernorm.add(x, stream_TD), wanted_B)
        return x, stream_TD

    @property
    def has_one_layer(self) -> bool:
        return len(self.layers) == 1

    @property
    def _first(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer), layer
        return layer

    def _enter(
        self, input_ids_T: Tensor, g_XD: Tensor, rows_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what the first layer's attention reads, and the stream beside it."""
        layer = self._first
        norm, embed_norm = layer.hidden_norm, layer.input_layernorm
        is_plain = self.embed_norm is None and not layer.norm_before_residual
        if is_plain and norm is not None and embed_norm is not None:
            norms = JointNorms(embed_norm.weight, norm.weight, norm.eps)
            given = *self._table(input_ids_T), g_XD, norms
            if rows_T is None:
                return joint_input(*given), g_XD
            return joint_input_of_rows(*given, rows_T)
        g_TD = g_XD if rows_T is None else g_XD[rows_T]
        embed_TD = self.embed_tokens(input_ids_T)
        if self.embed_norm is not None:
            embed_TD = self.embed_norm(embed_TD)
        if self.config.entry == "fc" and self.fc is not None:
            pair = embed_TD, g_TD
            if self.feature_norm is not None:
                pair = self.feature_norm(g_TD), embed_TD
            g_TD = self.fc(torch.cat(pair, dim=-1))
        return layer.enter(g_TD, embed_TD)

    def _table(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows, by number, of a table that has the embeddings of these ids."""
        if not self.is_cut:
            return ids_T, self.embed_tokens.weight
        return torch.arange(len(ids_T), device=ids_T.device), self.embed_tokens(ids_T)

    def add(self, x: Sums, stream_XD: Tensor, out_XD: Tensor) -> None:
        """Finish what `forward` returns: the stream after the last layer overwrites out."""
        self._add(x, stream_XD, out_XD)

    def head_input(self, stream_XD: Tensor) -> tuple[Tensor, Tensor]:
        """From finished streams [X, D], make the head's input and the next row's feature."""
        normed_XD = stream_XD if self.norm is None else self.norm(stream_XD)
        return normed_XD, normed_XD if self.config.recycled == "post_norm" else stream_XD

    def next_level(
        self,
        input_ids_B: Tensor,
        g_XD: Tensor,
        rows_B: Tensor | None = None,
        streams_out_BD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` on the draft's own streams; returns what `head_input` does.

        streams_out: receives the recycled stream and is returned in its place; may be g. Unused
            where the norm's output is recycled
        """
        x, stream_BD = self(input_ids_B, g_XD, rows_B)
        if self.norm is None:
            out_BD = streams_out_BD
            if out_BD is None:
                out_BD = stream_BD.new_empty(x.parts_STN.shape[1:])
            self.add(x, stream_BD, out_BD)
            return out_BD, out_BD
        if self.config.recycled == "post_norm":
            normed_BD, _ = self.norm.add(x, stream_BD)
            return normed_BD, normed_BD
        normed_BD, stream_BD = self.norm.add(x, stream_BD, streams_out_BD)
        return normed_BD, stream_BD if streams_out_BD is None else streams_out_BD
