"""Block drafts as one module: backbone and heads of DFlash, DSpark and DFlash2, by BlockConfig.

A context row is a function of the target's features alone, so its keys and values need no pass
through the layers: `extend` makes those of all layers by one product. `forward` runs the rows of
blocks, whose attention sees what the forward context says.
Letters: T rows of the context, X rows of blocks, B blocks, L layers, D hidden, E width of the
target's features, V target vocabulary, W draft vocabulary, r and s ranks, k candidates.
"""

import torch
from torch import Tensor, nn

from specdec.kernels.add_transitions import add_transitions
from specdec.kernels.convolve import convolve
from specdec.kernels.invariant import sigmoid
from specdec.kernels.linear import Sums, linear, split_linear
from specdec.kernels.norms import add_rms_norm
from specdec.kernels.rotate_and_store import Rope, Rows
from specdec.kernels.store_context import KeyNorms, store_context
from specdec.models.attention import rows_per_request
from specdec.models.decoder import DecoderLayer
from specdec.models.layers import Embedding, Linear, Quantised, RMSNorm, parameter
from weights.draft.config import BlockConfig


class Convolution(nn.Module):
    """Mixes each row of a block with the row before it, before a sublayer and after it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        D = config.layer.hidden_size
        self.base_kernel = parameter(2, 2, D)
        self.kernel_projection = Linear(D, 2 * 2 * D // config.conv_group_size)

    def begin(self, normed: Tensor | Quantised) -> tuple[Tensor, Tensor]:
        """Return what the sublayer reads [X, D], and the changes of the weights after it."""
        assert isinstance(normed, Tensor), "the layers of a draft have plain weights"
        before_XG, after_XG = self.kernel_projection(normed).chunk(2, dim=1)
        rows = Sums(normed[None], None)
        return convolve(rows, self.base_kernel[0], before_XG, rows_per_request()), after_XG

    def end(self, sums: Sums, changes_XG: Tensor) -> Sums:
        """Return what goes to the stream in place of the sublayer's result."""
        rows_XD = convolve(sums, self.base_kernel[1], changes_XG, rows_per_request())
        return Sums(rows_XD[None], None)


class ConvolvedLayer(DecoderLayer):
    """A layer of a DFlash2 draft."""

    def __init__(self, config: BlockConfig, index: int, rope: Rope) -> None:
        super().__init__(config.layer, index, rope, add_rms_norm, None)
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def forward(self, normed: Tensor | Quantised, stream_XD: Tensor) -> tuple[Sums, Tensor]:
        read_XD, changes_XG = self.attention_conv.begin(normed)
        queries_XHC = self.self_attn.store(read_XD)
        sums, stream_XD = self.self_attn.finish(queries_XHC, stream_XD, None)
        sums = self.attention_conv.end(sums, changes_XG)
        normed, stream_XD = self.post_attention_layernorm.add(sums, stream_XD)
        read_XD, changes_XG = self.mlp_conv.begin(normed)
        return self.mlp_conv.end(self.mlp(read_XD), changes_XG), stream_XD


class CandidateSelector(nn.Module):
    """What the token before a draft adds to the logits of the best tokens of its row."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        s = config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = parameter(config.vocab_size, s)
        self.successor_codebook = parameter(config.draft_vocab_size, s)
        self.hidden_projection = Linear(config.layer.hidden_size, s)

    def add(self, scores_kB: Tensor, ids_kB: Tensor, token_B: Tensor, projected_Bs: Tensor) -> None:
        """Add it to the scores of these ids. projected: what hidden_projection makes of rows"""
        codebooks = self.predecessor_codebook, self.successor_codebook
        add_transitions(scores_kB, ids_kB, token_B, projected_Bs, *codebooks)


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits: markov_w2 times `forward`'s result."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        r, D = config.markov_rank, config.layer.hidden_size
        self.markov_w1 = Embedding(config.vocab_size, r)
        self.markov_w2 = Embedding(config.draft_vocab_size, r)  # never run: see drafts/block.py
        self.gate = Linear(D + r, r, bias=True) if config.markov == "gated" else None
        self.joint = Linear(2 * r + D, 3 * r, bias=True) if config.markov == "rnn" else None

    def forward(
        self, e_Br: Tensor, hidden_BD: Tensor, state_Br: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [B, r] for markov_w2, and the state for the next draft of the block.

        e:      markov_w1 of the tokens before, by the target's ids
        hidden: of the rows that propose
        state:  what the draft before returned; None for the first one
        """
        if self.gate is not None:
            gate_Br = sigmoid(self.gate(torch.cat([hidden_BD, e_Br], dim=-1)))
            return (gate_Br * e_Br.float()).to(e_Br.dtype), None
        if self.joint is None:
            return e_Br, None
        before_Br = torch.zeros_like(e_Br) if state_Br is None else state_Br
        read = torch.cat([before_Br, e_Br, hidden_BD], dim=-1)
        gate_Br, candidate_Br, out_Br = self.joint(read).float().chunk(3, dim=-1)
        kept_Br = sigmoid(gate_Br)
        state = kept_Br * before_Br.float() + (1 - kept_Br) * _tanh(candidate_Br)
        return _tanh(out_Br).to(e_Br.dtype), state.to(e_Br.dtype)


class ConfidenceHead(nn.Module):
    """How likely a draft holds if all before it do."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.reads_markov = config.confidence == "markov"
        width = config.layer.hidden_size + self.reads_markov * config.markov_rank
        self.proj = Linear(width, 1, bias=True)

    def forward(self, hidden_BD: Tensor, e_Br: Tensor | None) -> Tensor:
        """Return probabilities [B] float32. e: markov_w1 of the tokens before, where it reads it"""
        read = hidden_BD
        if self.reads_markov and e_Br is not None:
            read = torch.cat([hidden_BD, e_Br], dim=-1)
        scores_B1 = linear(read, self.proj.weight, self.proj.bias, out_dtype=torch.float32)
        return sigmoid(scores_B1)[:, 0]


class BlockModel(nn.Module):
    """A whole draft: no rank has a part of one."""

    def __init__(self, config: BlockConfig, rope: Rope) -> None:
        super().__init__()
        D, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, D)
        self.fc = Linear(len(config.aux_boundaries) * config.target_hidden_size, D)
        self.hidden_norm = RMSNorm(D, eps)
        layers = [
            ConvolvedLayer(config, i, rope)
            if config.conv_group_size
            else DecoderLayer(config.layer, i, rope, add_rms_norm, None)
            for i in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(D, eps)
        self.lm_head = Embedding(config.draft_vocab_size, D)  # never run: see drafts/block.py
        self.markov_head = None if config.markov is None else MarkovHead(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.confidence_head = None if config.confidence is None else ConfidenceHead(config)
        self.logits_factor = 1.0  # a borrowed head has the target's
        self._rope = rope
        norms = (layer.input_layernorm for layer in layers)  # plain, as all of a draft
        first_norm, *next_norms = (norm for norm in norms if isinstance(norm, RMSNorm))
        self._first_norm = (first_norm,)  # in containers: parts of layers, not further modules
        self._path = list(zip(layers, [*next_norms, self.norm], strict=True))
        self._context: tuple[Tensor, Tensor | None, KeyNorms | None] | None = None

    def join_context(self) -> None:
        """Copy the layers' weights of keys and values into one product; call once they are there.

        On a GPU they take L x 2 x kv heads x head_dim x D numbers more.
        """
        attentions = [layer.self_attn for layer, _ in self._path]
        kind = self.config.layer
        first = kind.num_heads * kind.head_dim
        weight = torch.cat([each.qkv_proj.weight[first:] for each in attentions])
        biases = [
            each.qkv_proj.bias[first:] for each in attentions if each.qkv_proj.bias is not None
        ]
        norms: list[Tensor] = [each.k_norm.weight for each in attentions if each.k_norm is not None]
        key_norms = KeyNorms(torch.stack(norms), kind.rms_norm_eps) if norms else None
        self._context = weight, torch.cat(biases) if biases else None, key_norms

    def extend(self, features_TE: Tensor, rows: Rows, caches: Tensor) -> None:
        """Cache keys and values of the context. rows: positions and slots; caches: of all layers"""
        assert self._context is not None, "join_context was not called"
        weight, bias, norms = self._context
        context_TD = self.hidden_norm(self.fc(features_TE))
        store_context(split_linear(context_TD, weight, bias), self._rope, norms, rows, caches)

    def forward(self, input_ids_X: Tensor) -> Tensor:
        """Return hidden states after the final norm [X, D]; keys and values are cached."""
        stream_XD: Tensor = self.embed_tokens(input_ids_X)
        normed_XD: Tensor = self._first_norm[0](stream_XD)
        for layer, norm in self._path:
            sums, stream_XD = layer(normed_XD, stream_XD)
            normed_XD, stream_XD = norm.add(sums, stream_XD)
        return normed_XD

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Compute what the head says before the markov head or the selector, float32 [X, W]."""
        logits_XW = linear(hidden_XD, self.lm_head.weight, out_dtype=torch.float32)
        return logits_XW if self.logits_factor == 1.0 else logits_XW.mul_(self.logits_factor)


def _tanh(x: Tensor) -> Tensor:
    return 2 * sigmoid(2 * x) - 1
