"""What a draft's checkpoint says, as frozen numbers: an EAGLE head, or a draft of blocks.

Every difference between checkpoints is a field here; no other package asks for a file's format.
Both kinds answer the same questions, so that callers need not ask which one they have.
Letters: V target vocabulary, W draft vocabulary, D hidden, Dt target hidden, L target layers.
"""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from weights.config import Heads, LayerKind
from weights.shard import WHOLE, Shard


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
    max_drafts: ClassVar[int] = sys.maxsize  # of a round
    context_width: ClassVar[int] = 0  # a row of the context passes through the layers

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
    def grows_trees(self) -> bool:
        """Whether drafts are trees on request."""
        return not self.is_parallel

    @property
    def most_steps(self) -> int | None:
        """Bound the passes of a round; None: each draft has its own."""
        return 2 if self.is_parallel else None

    @property
    def heads(self) -> Heads:
        return self.layer.heads

    def block_rows(self, num_drafts: int) -> int:
        """Count a request's rows in the pass that proposes several drafts; 0: there is none."""
        # the first draft comes from the row before
        return max(num_drafts - 1, 0) if self.is_parallel else 0

    def is_read_again(self, name: str) -> bool:
        """Whether each pass of a round reads the weight, not the first one alone."""
        return name != "fc.weight" or self.entry == "fc"

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
    trained_drafts: ClassVar[None] = None  # a whole block
    most_steps: ClassVar[None] = None

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
    def grows_trees(self) -> bool:
        """Whether drafts are trees on request."""
        return not self.selector_rank

    @property
    def context_width(self) -> int:
        """Count the keys and values of a context row: all that its layers make of it."""
        _, G, C = self.heads
        return self.num_layers * 2 * G * C

    @property
    def heads(self) -> Heads:
        return self.layer.heads

    def block_rows(self, num_drafts: int) -> int:
        """Count a request's rows in the pass that proposes several drafts; 0: there is none."""
        return num_drafts + (not self.anchor_proposes) if num_drafts else 0

    def is_read_again(self, name: str) -> bool:
        """Return that no weight is: a round has one pass."""
        return False

    def within(self, context: int) -> "BlockConfig":
        """Return it as it is: no layer has a window."""
        return self

    def local(self, shard: Shard) -> "BlockConfig":
        """Return it as it is: no rank has a part of it."""
        assert shard == WHOLE, f"{shard} of a block draft"
        return self


DraftConfig = EagleConfig | BlockConfig
