"""What a checkpoint says, as frozen numbers: a decoder layer, a target, a draft of either kind.

Every difference between checkpoints is a field here; no other package asks for a file's format.
A rank of a model that is cut has sizes of its own: `local` gives them, as the same kind of config.
Letters: V target vocabulary, W draft vocabulary, D hidden, Dt target hidden, L target layers.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from weights.shard import WHOLE, Shard

# of a weight: 16 or 32 bits a number, four (turned.py), or eight with a scale for each row or for
# each block (fp8.py)
Form = Literal["plain", "mxfp4", "fp8 channel", "fp8 block"]
BLOCK = 128  # columns, and in files rows, that share a scale of "fp8 block"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding as in config.json; the fields below the blank line are for scaled kinds."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"

    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class Heads(NamedTuple):
    """What the shapes of a cache and of attention's kernels follow from."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Forms(NamedTuple):
    """The form of each product of a layer, experts aside, by its module."""

    qkv_proj: Form = "plain"
    o_proj: Form = "plain"
    gate_up_proj: Form = "plain"
    down_proj: Form = "plain"


PLAIN = Forms()


class Clamp(NamedTuple):
    """SwiGLU of gpt-oss: (up + 1) gate sigmoid(alpha gate).

    gate is at most the limit, and up lies between -limit and limit.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: a router chooses `per_token` of `num` MLPs for each row.

    renormalise: weights of the chosen ones add up to 1; if not, a softmax over all gives them
    is_stacked:  files hold one tensor for all experts of a layer
    is_turned:   these are [in, out], and rows of gate and up alternate
    has_biases:  the router has biases, and so have the experts' products
    clamp:       None: plain SwiGLU
    form:        of the experts' weights in files and memory
    shard:       whose experts are `held`; routers know all
    """

    num: int
    per_token: int
    width: int  # of each expert
    renormalise: bool
    is_stacked: bool = False
    is_turned: bool = False
    has_biases: bool = False
    clamp: Clamp | None = None
    form: Form = "plain"
    shard: Shard = WHOLE

    @property
    def held(self) -> range:
        """List the experts whose weights there are, by number."""
        return self.shard.range_of(self.num)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What a decoder layer is; layers of one kind differ by their weights alone."""

    hidden_size: int
    intermediate_size: int  # of the MLP; 0 where there are experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None  # of scores; None: head_dim^-0.5
    window: int | None = None  # a row at p sees keys p - window < k <= p; None: all up to p
    has_sinks: bool = False  # one more score for each head, without a value (sinks_H, float32)
    residual_multiplier: float = 1.0  # of what attention and MLP add to the stream
    experts: ExpertsConfig | None = None  # None: one MLP
    forms: Forms = PLAIN

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def within(self, context: int) -> "LayerKind":
        """Leave out a window that no row of a context of this many tokens reaches beyond."""
        has_window = self.window is not None and self.window < context
        return self if has_window else replace(self, window=None)

    def local(self, shard: Shard) -> "LayerKind":
        """Give a rank's heads, kv heads, columns of the MLP, and experts."""
        return replace(
            self,
            num_heads=len(shard.range_of(self.num_heads)),
            num_kv_heads=len(shard.range_of(self.num_kv_heads)),
            intermediate_size=len(shard.range_of(self.intermediate_size)),
            experts=None if self.experts is None else replace(self.experts, shard=shard),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A target of a known family (families/table.py)."""

    model_type: str
    layers: tuple[LayerKind, ...]  # of one width and one shape of heads
    vocab_size: int
    max_position_embeddings: int
    has_tied_head: bool
    dtype: str  # as stored, "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # config.json and generation_config.json together
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0  # logits are divided by it

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, each once, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def experts(self) -> ExpertsConfig | None:
        """Find the experts that all layers with experts have; None: no layer has any.

        The form of their weights may differ by layer: it is that of the first.
        """
        found = [kind.experts for kind in self.kinds if kind.experts is not None]
        alike = {replace(experts, form="plain") for experts in found}
        assert len(alike) <= 1, f"layers with different experts: {found}"
        return next(iter(found), None)

    @property
    def hidden_size(self) -> int:
        return self.layers[0].hidden_size

    @property
    def heads(self) -> Heads:
        """The heads that all layers have."""
        found = {kind.heads for kind in self.kinds}
        assert len(found) == 1, f"layers with different heads: {found}"
        return self.layers[0].heads

    def within(self, context: int) -> "TargetConfig":
        """Leave out windows that no row of a context of this many tokens reaches beyond."""
        return replace(self, layers=tuple(kind.within(context) for kind in self.layers))

    def local(self, shard: Shard) -> "TargetConfig":
        """Give a rank's layers; vocab_size counts its rows of the embedding and the head."""
        local = {kind: kind.local(shard) for kind in self.kinds}
        return replace(
            self,
            layers=tuple(local[kind] for kind in self.layers),
            vocab_size=len(shard.ids_of(self.vocab_size)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """An EAGLE draft in five choices: features, entry of (hidden, token), recycling, head, norms.

    A row embeds token x_{t+1} and takes a feature g_t. The formulas (EAGLE-1: arXiv 2401.15077,
    EAGLE-3: 2503.01840):

    - features: `aux_boundaries` non-empty: the residual streams that enter those layers of the
      target, concatenated (Dt each; boundary L = after the last layer, before the final norm).
      Empty: the target's hidden states after its final norm. `norm_before_fc`: one RMSNorm over the
      concatenation; `has_fc_norm`: one RMSNorm per boundary; then `fc` if `has_fc`. Recycled hidden
      states pass neither these norms nor fc when entry is "qkv".
    - entry "fc": u = fc(concat(embed, g)) is the first layer's residual stream (EAGLE-1; every row
      passes fc). MTP heads have fc(concat(feature_norm(g), embed_norm(embed))). entry "qkv": the
      first layer's attention reads concat(input_layernorm(embed), hidden_norm(g)), 2D wide, and the
      residual stream starts as g, or as hidden_norm(g) with `norm_before_residual` (EAGLE-3).
    - recycled: "pre_norm", the residual stream after the last layer; "post_norm", after `norm`.
    - head: logits = lm_head(norm(stream)), or lm_head(stream) where `has_final_norm` is False.
    - `mask_token_id` (P-EAGLE: 2602.01469): rows after the last committed one, which proposes the
      first draft, embed this token and have the feature mask_hidden; nothing is recycled.
    """

    format: str  # for reports: "eagle-1", "eagle-3", "specforge", "speculators-eagle3", ...
    layer: LayerKind
    num_layers: int
    vocab_size: int  # V
    draft_vocab_size: int  # W
    target_hidden_size: int  # Dt
    max_position_embeddings: int
    aux_boundaries: tuple[int, ...]
    entry: Literal["fc", "qkv"]
    has_fc: bool
    fc_bias: bool = False
    norm_before_fc: bool = False
    has_fc_norm: bool = False
    has_embed_norm: bool = False  # entry "fc": RMSNorm over the embedding (speculators' layernorms)
    has_feature_norm: bool = False  # entry "fc": RMSNorm over g, which then comes first (MTP)
    has_input_layernorm: bool = True  # first layer: on its stream ("fc") or the embedding ("qkv")
    has_hidden_norm: bool = True  # entry "qkv" only
    norm_before_residual: bool = False
    has_final_norm: bool = True
    recycled: Literal["pre_norm", "post_norm"] = "pre_norm"
    mask_token_id: int | None = None
    trained_drafts: int | None = None  # that a parallel draft was trained to propose, if known
    has_own_embedding: bool = False
    has_own_head: bool = True
    has_d2t: bool = False

    @property
    def method(self) -> Literal["eagle", "eagle3", "peagle", "mtp"]:
        """Name it as users do."""
        if self.is_parallel or self.has_feature_norm:
            return "peagle" if self.is_parallel else "mtp"
        return "eagle" if self.entry == "fc" else "eagle3"

    @property
    def is_parallel(self) -> bool:
        """Whether one pass proposes all drafts after the first."""
        return self.mask_token_id is not None

    @property
    def heads(self) -> Heads:
        return self.layer.heads

    def within(self, context: int) -> "EagleConfig":
        """Leave out a window that no row of a context of this many tokens reaches beyond."""
        return replace(self, layer=self.layer.within(context))

    def local(self, shard: Shard) -> "EagleConfig":
        """Give a rank's layer; both vocabularies count its rows. fc and norms are whole."""
        return replace(
            self,
            layer=self.layer.local(shard),
            vocab_size=len(shard.ids_of(self.vocab_size)),
            draft_vocab_size=len(shard.ids_of(self.draft_vocab_size)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """A draft that proposes a block of tokens in one pass (DFlash: arXiv 2602.06036).

    A block has rows [x_n, mask, mask, ...] at positions n, n + 1, ..., where x_n, the anchor, is
    the last sampled token. Each row attends to the context and to all rows of its block.

    - context: c_t = hidden_norm(fc(features of t)); the same products that make keys and values of
      a layer's rows make those of c_t, in every layer, without the layer's input_layernorm.
    - proposals: row i proposes the token after it if `anchor_proposes`, so a block of B rows has B
      drafts; else a mask proposes the token at its own place, and there are B - 1.
    - `markov` (DSpark: 2607.05147): logits get markov_w2 f, with e = markov_w1[token before].
      "vanilla": f = e; "gated": f = sigmoid(gate [h, e]) e; "rnn": [g, c, o] = joint [s, e, h],
      s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c), and f = tanh(o).
    - `confidence`: sigmoid(proj [h, e] + b) estimates that a draft holds if those before it do;
      "hidden": of h alone.
    - `conv_group_size` (DFlash2, z-lab/dflash): around attention and MLP of each layer, block row t
      becomes (base_0 + d_0) x_t + (base_1 + d_1) x_{t-1}, with x = 0 before the block. The first
      half of kernel_projection times the normed row is d before the sublayer, the second half after
      it; channels of a group share d. Rows of the context stay as they are.
    - `selector_rank`, `selector_top_k` (DFlash2): a draft is one of its row's top_k best logits,
      each plus <predecessor[token before] * hidden_projection h, successor[candidate]>.
    """

    format: str  # for reports: "dflash", "deepspec-dspark", "speculators-dspark", ...
    layer: LayerKind
    num_layers: int
    vocab_size: int  # V
    draft_vocab_size: int  # W
    target_hidden_size: int  # Dt
    max_position_embeddings: int
    aux_boundaries: tuple[int, ...]
    block_size: int  # B, the most rows of a block
    mask_token_id: int
    anchor_proposes: bool
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    markov_rank: int = 0
    confidence: Literal["hidden", "markov"] | None = None
    conv_group_size: int = 0  # 0: no convolutions
    selector_rank: int = 0  # 0: no selector
    selector_top_k: int = 0
    has_own_embedding: bool = False
    has_own_head: bool = False
    has_d2t: bool = False
    is_parallel: ClassVar[bool] = True

    @property
    def method(self) -> Literal["dflash", "dspark", "dflash2"]:
        """Name it as users do: DSpark drafts have a head that sees the token before."""
        if self.selector_rank:
            return "dflash2"
        return "dflash" if self.markov is None and self.confidence is None else "dspark"

    @property
    def max_drafts(self) -> int:
        """Count the drafts of a whole block."""
        return self.block_size - (not self.anchor_proposes)

    @property
    def heads(self) -> Heads:
        return self.layer.heads

    def within(self, context: int) -> "BlockConfig":
        """Return it as it is: no layer has a window."""
        return self

    def local(self, shard: Shard) -> "BlockConfig":
        """Return it as it is: no rank has a part of it."""
        assert shard == WHOLE, f"{shard} of a block draft"
        return self


DraftConfig = EagleConfig | BlockConfig
