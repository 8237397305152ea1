"""What a family of targets may say that plain Llama does not."""

from collections.abc import Mapping
from dataclasses import dataclass

from weights.config import Clamp, Form
from weights.rename import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRow:
    """Where config.json says what about experts, and what counts where it does not."""

    num: int
    per_token: int
    width: str  # the key of an expert's width
    default_width: int | None = None  # None: the key must be there
    renormalise: bool | str = True
    has_dense_layers: bool = False  # where decoder_sparse_step and mlp_only_layers say so
    is_stacked: bool = False
    is_turned: bool = False
    has_biases: bool = False
    clamp: Clamp | None = None  # where swiglu_limit and swiglu_alpha are not in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model type differs from plain Llama; a string is the key of config.json to read."""

    title: str  # in errors and documents
    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    bias_default: bool = False  # where such a key is not in config.json
    qk_norm: bool = False
    has_sinks: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: Mapping[str, object] | None = None  # rope_parameters, where config.json has none
    has_window: bool = False  # where sliding_window is in config.json; it may be null
    sliding_window: int | None = None  # where it is not there
    window_switch: str | None = None  # the key that turns the window on
    window_start: str | None = None  # the key of the first layer that has one; None: all have
    sliding: tuple[bool, ...] = ()  # which layers have it, by turns, where layer_types is not there
    forms: tuple[Form, ...] = ("fp8 channel", "fp8 block")  # that weights may have, beside "plain"
    has_multipliers: bool = False  # of embeddings, scores, residuals and logits
    names_boundaries: bool = False  # so do its heads, in every format (draft/resolve.py)
    experts: ExpertsRow | None = None
    names: tuple[Row, ...] = ()  # its own names and what it drops, after TARGET_ROWS
