"""The target: Llama, Mistral, Qwen2 and Qwen3 by the fields of LayerConfig (biases, qk-norm, head_dim).

The residual stream travels beside the hidden state and is added inside the next norm. `tap` writes the stream that
enters a layer into a column block of the buffer that an EAGLE-3 draft reads.
Letters: T rows, D hidden, E = taps x D, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.kernels.linear import linear
from specdec.models.layers import MLP, Attention, Embedding, RMSNorm
from weights.config import LayerConfig, TargetConfig


class DecoderLayer(nn.Module):
    def __init__(self, config: LayerConfig, index: int, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index, rope, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output before its residual addition, and the residual stream to add it to."""
        x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, positions_T)
        x_TD, residual_TD = self.post_attention_layernorm(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class LlamaModel(nn.Module):
    """aux_boundaries: layers whose entering stream is tapped (L = behind the last), in the order of the columns."""

    def __init__(self, config: TargetConfig, rope: tuple[Tensor, Tensor], aux_boundaries: Sequence[int] = ()) -> None:
        super().__init__()
        self.columns = {boundary: i for i, boundary in enumerate(aux_boundaries)}
        D = config.layer.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, i, rope) for i in range(config.num_layers))
        self.norm = RMSNorm(D, config.layer.rms_norm_eps)
        self.lm_head = Embedding(config.vocab_size, D)  # never multiplied through forward: see logits

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, aux_out_TE: Tensor | None = None) -> Tensor:
        """Hidden states behind the final norm [T, D]; aux_out_TE is filled column block by column block."""
        hidden_TD, residual_TD = self.embed_tokens(input_ids_T), None
        for i, layer in enumerate(self.layers):
            self.tap(i, hidden_TD, residual_TD, aux_out_TE)
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, positions_T)
        self.tap(len(self.layers), hidden_TD, residual_TD, aux_out_TE)
        normed_TD: Tensor = self.norm(hidden_TD, residual_TD)[0]
        return normed_TD

    def tap(self, boundary: int, hidden_TD: Tensor, residual_TD: Tensor | None, aux_out_TE: Tensor | None) -> None:
        """Write the stream at `boundary` into its columns, if the draft reads it."""
        if aux_out_TE is None or boundary not in self.columns:
            return
        D = hidden_TD.shape[1]
        columns = aux_out_TE[:, self.columns[boundary] * D :][:, :D]
        columns.copy_(hidden_TD if residual_TD is None else hidden_TD + residual_TD)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Float32 accumulators of the last product, [X, V], never rounded."""
        return linear(hidden_XD, self.lm_head.weight, out_dtype=torch.float32)
