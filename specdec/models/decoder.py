"""The target of any family: a layer does what its kind says (weights/config.py).

A layer leaves its last product unfinished; the next norm finishes it and adds it to the residual
stream. `tap` writes the stream that enters a layer into a buffer that an EAGLE-3 draft reads.
Letters: T rows, D hidden, E = taps x D, V vocabulary.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specdec.kernels.linear import Sums, linear
from specdec.models.experts import Experts
from specdec.models.layers import (
    MLP,
    Attention,
    Embedding,
    Norm,
    Quantised,
    QuantisingNorm,
    Reader,
    RMSNorm,
    embedding,
    local_kind,
    norm_before,
    reads_all,
    reads_share,
)
from specdec.parallel.exchange import Exchange
from weights.config import LayerKind, RopeConfig, TargetConfig


class DecoderLayer(nn.Module):
    """A layer, or a rank's part of it. kind: of the whole; reader: of its first norm."""

    def __init__(
        self,
        kind: LayerKind,
        index: int,
        rope: tuple[Tensor, Tensor],
        reader: Reader,
        exchange: Exchange | None,
    ) -> None:
        super().__init__()
        D, eps = kind.hidden_size, kind.rms_norm_eps
        self.kind = kind
        self.index = index
        forms = kind.forms
        self.input_layernorm = norm_before(forms.qkv_proj, D, eps, reader)
        self.self_attn = Attention(kind, index, rope, D, exchange)
        experts = local_kind(kind, exchange).experts
        has_router = experts is not None
        form = forms.gate_up_proj if experts is None else experts.form
        self.post_attention_layernorm = norm_before(form, D, eps, reads_share(exchange), has_router)
        self.mlp = MLP(kind, exchange) if experts is None else Experts(D, experts)

    def forward(self, normed: Tensor | Quantised, stream_TD: Tensor) -> tuple[Sums, Tensor]:
        """Take the entering stream and its norm to the last product and the stream to add it to."""
        return self.finish(self.self_attn.store(normed), stream_TD)

    def finish(
        self, q_THC: Tensor, stream_TD: Tensor, rows_X: Tensor | None = None
    ) -> tuple[Sums, Tensor]:
        """Go on once keys and values are cached. rows: those of the results; None: all."""
        factor = self.kind.residual_multiplier
        sums, stream_XD = self.self_attn.finish(q_THC, stream_TD, rows_X)
        sums = sums._replace(factor=factor)
        normed, stream_XD = self.post_attention_layernorm.add(sums, stream_XD)
        is_dense = isinstance(self.mlp, MLP)
        sums = self.mlp(normed) if is_dense else self.mlp(normed, rows_X)
        return sums._replace(factor=factor), stream_XD


class DecoderModel(nn.Module):
    """A decoder whose streams can be tapped.

    config:         of the whole model
    ropes:          the tables of each rope that a layer has
    aux_boundaries: layers whose entering stream is tapped, by column; L: after the last one
    exchange:       how this rank's part of the model meets the others; None: it is whole
    """

    def __init__(
        self,
        config: TargetConfig,
        ropes: Mapping[RopeConfig, tuple[Tensor, Tensor]],
        aux_boundaries: Sequence[int] = (),
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__()
        self.experts = config.experts
        self.columns = {boundary: i for i, boundary in enumerate(aux_boundaries)}
        D = config.hidden_size
        self.embed_tokens = embedding(config.vocab_size, D, exchange)
        # the last layer may finish some rows only, whose streams it picks of all
        readers = [reads_share(exchange)] * (config.num_layers - 1) + [reads_all(exchange)]
        layers = [
            DecoderLayer(kind, i, ropes[kind.rope], reader, exchange)
            for i, (kind, reader) in enumerate(zip(config.layers, readers, strict=True))
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(D, layers[-1].kind.rms_norm_eps, reads_share(exchange))
        first_norm, *next_norms = (layer.input_layernorm for layer in layers)
        # in containers: these are parts of their layers, not further modules
        self._first_norm = (first_norm,)
        self._path = list(zip(layers, [*next_norms, self.norm], strict=True))
        self.lm_head = Embedding(len(self.embed_tokens.weight), D)  # never run: see logits
        self.embedding_factor = config.embedding_multiplier
        self.logits_factor = 1.0 / config.logits_scaling

    def forward(self, input_ids_T: Tensor, aux_out_TE: Tensor) -> Tensor:
        """Compute hidden states after the final norm [T, D]; the taps fill aux_out_TE."""
        return self.finish(*self.begin(input_ids_T, aux_out_TE), aux_out_TE)

    def begin(self, input_ids_T: Tensor, aux_out_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Cache all KV; return the last layer's queries [T, H, C] and the stream that enters it."""
        stream_TD: Tensor = self.embed_tokens(input_ids_T)
        if self.embedding_factor != 1.0:
            stream_TD = stream_TD * self.embedding_factor
        normed: Tensor | Quantised = self._first_norm[0](stream_TD)
        embedding_tap_TD = self.tap(0, aux_out_TE)
        if embedding_tap_TD is not None:
            embedding_tap_TD.copy_(stream_TD)
        *path, (last, _) = self._path
        for layer, norm in path:
            sums, stream_TD = layer(normed, stream_TD)
            normed, stream_TD = norm.add(sums, stream_TD, self.tap(layer.index + 1, aux_out_TE))
        return last.self_attn.store(normed), stream_TD

    def finish(
        self,
        q_THC: Tensor,
        stream_TD: Tensor,
        aux_out_TE: Tensor | None = None,
        rows_X: Tensor | None = None,
    ) -> Tensor:
        """Finish hidden states after the final norm. rows: those that are wanted [X, D]; None: all.

        aux_out: where a tap after the last layer goes, of all rows; None: there is none
        """
        last, norm = self._path[-1]
        tap_TD = None if aux_out_TE is None else self.tap(last.index + 1, aux_out_TE)
        sums, stream_XD = last.finish(q_THC, stream_TD, rows_X)
        normed_XD, _ = norm.add(sums, stream_XD, tap_TD)
        assert isinstance(normed_XD, Tensor), "the head reads plain rows"
        return normed_XD

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Leave layers out of the body's forwards that run the same kernels as others.

        The last one stays, which may finish some rows only. Before it, where all rows are finished,
        one of every kind stays, and one of every kind that is tapped, before either kind of norm.
        """
        path = self._path
        *before, last = path
        self._path = [*_one_of_each(before, self.columns), last]
        try:
            yield
        finally:
            self._path = path

    def tap(self, boundary: int, aux_out_TE: Tensor) -> Tensor | None:
        """Find the columns that take the stream at `boundary`, if the draft reads it."""
        if boundary not in self.columns:
            return None
        D = self.norm.weight.shape[0]
        return aux_out_TE[:, self.columns[boundary] * D :][:, :D]

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Compute the last product in float32 [X, V], times its factor; best_token does so too.

        A rank has the columns of its ids.
        """
        logits_XV = linear(hidden_XD, self.lm_head.weight, out_dtype=torch.float32)
        return logits_XV if self.logits_factor == 1.0 else logits_XV.mul_(self.logits_factor)


def _one_of_each(
    before: Sequence[tuple[DecoderLayer, Norm]], tapped: Container[int]
) -> list[tuple[DecoderLayer, Norm]]:
    """Choose layers for a shortened path, each with the norm that follows it.

    A norm that leaves codes may stand before another layer than in the whole path: one that reads
    plain rows gets them from a layer between.
    """
    kept: list[tuple[DecoderLayer, Norm]] = []

    def keep(layer: DecoderLayer, norm: Norm) -> None:
        if kept and _quantises(kept[-1][1]) and not _quantises(layer.input_layernorm):
            between = before[kept[-1][0].index + 1 : layer.index]
            kept.append(next(pair for pair in between if not _quantises(pair[1])))
        kept.append((layer, norm))

    found = set()
    for layer, norm in before:
        key = layer.kind, layer.index + 1 in tapped, _quantises(norm)
        if key not in found:
            found.add(key)
            keep(layer, norm)
    if before:  # the last layer's own norm is before it: of several ranks it reads all rows
        layer, norm = before[-1]
        if _quantises(kept[-1][1]) != _quantises(norm):
            keep(layer, norm)
        kept[-1] = kept[-1][0], norm
    return kept


def _quantises(norm: nn.Module) -> bool:
    return isinstance(norm, QuantisingNorm)
