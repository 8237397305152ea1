"""What a checkpoint says, as frozen numbers: a decoder layer, a target; drafts: draft/config.py.

Every difference between checkpoints is a field here; no other package asks for a file's format.
A rank of a model that is cut has sizes of its own: `local` gives them, as the same kind of config.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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
