"""What a family of targets may say that plain Llama does not."""

from dataclasses import dataclass

from weights.rename import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model type differs from plain Llama; a string is the key of config.json to read."""

    title: str  # in errors and documents
    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_heads
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    window_switch: str | None = None  # the key that turns the window on
    names: tuple[Row, ...] = ()  # its own names and what it drops, after TARGET_ROWS
