"""The matrix products that a target and its draft ask for, each shape once: what tuning measures.

They are read from the configs alone. This file repeats what the modules call (llama.py, layers.py,
eagle.py); a test compares the two.
"""

from collections.abc import Iterator

from specdec.kernels.tile_shapes import Product
from weights.config import EagleConfig, LayerConfig, TargetConfig


def products_of(target: TargetConfig, eagle: EagleConfig | None, dtype: str) -> list[Product]:
    """List the products in the order of a pass; dtype: of the weights, "bfloat16"."""
    found = [*_of_target(target, dtype), *(_of_draft(eagle, dtype) if eagle is not None else ())]
    return list(dict.fromkeys(found))


def _of_target(config: TargetConfig, dtype: str) -> Iterator[Product]:
    D = config.layer.hidden_size
    yield from _of_layer(config.layer, D, dtype)
    yield Product("whole", config.vocab_size, D, dtype)


def _of_draft(config: EagleConfig, dtype: str) -> Iterator[Product]:
    D = config.layer.hidden_size
    Dt = config.target_hidden_size
    if config.has_fc:
        features = max(len(config.aux_boundaries), 1) * Dt
        yield Product("whole", D, D + Dt if config.entry == "fc" else features, dtype)
    widths = [2 * D if config.entry == "qkv" else D] + [D] * (config.num_layers - 1)
    for width in widths:
        yield from _of_layer(config.layer, width, dtype)
    yield Product("whole", config.draft_vocab_size, D, dtype)


def _of_layer(layer: LayerConfig, width: int, dtype: str) -> Iterator[Product]:
    """width: what the attention reads."""
    D = layer.hidden_size
    I = layer.intermediate_size
    C = layer.head_dim
    yield Product("split", (layer.num_heads + 2 * layer.num_kv_heads) * C, width, dtype)
    yield Product("split", D, layer.num_heads * C, dtype)
    yield Product("gate", 2 * I, D, dtype)
    yield Product("split", D, I, dtype)
