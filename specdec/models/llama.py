"""The target: Llama, Mistral, Qwen2 or Qwen3 by the fields of LayerConfig.

A layer leaves its last product unfinished; the next norm finishes it and adds it to the residual
stream. `tap` writes the stream that enters a layer into a buffer that an EAGLE-3 draft reads.
Letters: T rows, D hidden, E = taps x D, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specdec.kernels.linear import Sums, linear
from specdec.models.layers import MLP, Attention, Embedding, RMSNorm
from weights.config import LayerConfig, TargetConfig


class DecoderLayer(nn.Module):
    def __init__(self, config: LayerConfig, index: int, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index, rope, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, normed_TD: Tensor, stream_TD: Tensor) -> tuple[Sums, Tensor]:
        """From the entering stream and its norm: the last product, and the stream to add it to."""
        sums = self.self_attn(normed_TD)
        normed_TD, stream_TD = self.post_attention_layernorm.add(sums, stream_TD)
        return self.mlp(normed_TD), stream_TD


class LlamaModel(nn.Module):
    """aux_boundaries: layers whose entering stream is tapped, by column; L: after the last one."""

    def __init__(
        self, config: TargetConfig, rope: tuple[Tensor, Tensor], aux_boundaries: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.columns = {boundary: i for i, boundary in enumerate(aux_boundaries)}
        D = config.layer.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, D)
        layers = [DecoderLayer(config.layer, i, rope) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(D, config.layer.rms_norm_eps)
        first_norm, *next_norms = (layer.input_layernorm for layer in layers)
        # in containers: these are parts of their layers, not further modules
        self._first_norm = (first_norm,)
        self._path = list(zip(layers, [*next_norms, self.norm], strict=True))
        self.lm_head = Embedding(config.vocab_size, D)  # never run: see logits

    def forward(self, input_ids_T: Tensor, aux_out_TE: Tensor) -> Tensor:
        """Hidden states after the final norm [T, D]; the taps fill aux_out_TE."""
        stream_TD: Tensor = self.embed_tokens(input_ids_T)
        normed_TD: Tensor = self._first_norm[0](stream_TD)
        embedding_tap_TD = self.tap(0, aux_out_TE)
        if embedding_tap_TD is not None:
            embedding_tap_TD.copy_(stream_TD)
        for i, (layer, norm) in enumerate(self._path):
            sums, stream_TD = layer(normed_TD, stream_TD)
            normed_TD, stream_TD = norm.add(sums, stream_TD, self.tap(i + 1, aux_out_TE))
        return normed_TD

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """In the body a forward ends after its first tap: later layers run the same kernels."""
        path = self._path
        first_tap = min((boundary for boundary in self.columns if boundary > 0), default=0)
        self._path = path[: max(first_tap, 2)]
        try:
            yield
        finally:
            self._path = path

    def tap(self, boundary: int, aux_out_TE: Tensor) -> Tensor | None:
        """The columns that take the stream at `boundary`, if the draft reads it."""
        if boundary not in self.columns:
            return None
        D = self.norm.weight.shape[0]
        return aux_out_TE[:, self.columns[boundary] * D :][:, :D]

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 accumulators of the last product, [X, V], never rounded."""
        return linear(hidden_XD, self.lm_head.weight, out_dtype=torch.float32)
