"""Sizes of public models, whose products the shipped table knows, and of an EAGLE-3 draft of each.

The numbers are those of each model's config.json. A draft is one layer of its target's sizes with
32,000 tokens, as most published drafts are.
"""

from typing import NamedTuple

from specdec.kernels.tile_shapes import Product
from specdec.models.products import products_of
from weights.config import EagleConfig, LayerConfig, RopeConfig, TargetConfig

DRAFT_VOCABULARY = 32000
TAPS = (2, 8, 14)  # three of the target's layers; which ones makes no difference here


class Sizes(NamedTuple):
    """The columns of the table below, in order."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


KNOWN_MODELS = {
    "llama-3.2-1b": Sizes(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Sizes(3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": Sizes(4096, 14336, 32, 8, 128, 128256),
    "qwen3-0.6b": Sizes(1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": Sizes(2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": Sizes(2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": Sizes(4096, 12288, 32, 8, 128, 151936),
    "qwen3-14b": Sizes(5120, 17408, 40, 8, 128, 151936),
    "qwen3-32b": Sizes(5120, 25600, 64, 8, 128, 151936),
}


def known_products(name: str) -> list[Product]:
    """List a known model's and its draft's products, in bfloat16. ValueError: it is not known."""
    if name not in KNOWN_MODELS:
        raise ValueError(f"model {name!r}: known are {', '.join(KNOWN_MODELS)}")
    sizes = KNOWN_MODELS[name]
    return products_of(_target(sizes), _draft(sizes), "bfloat16")


def _layer(sizes: Sizes) -> LayerConfig:
    return LayerConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
    )


def _target(sizes: Sizes) -> TargetConfig:
    return TargetConfig(
        model_type="llama",
        layer=_layer(sizes),
        num_layers=1,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=1,
        has_tied_head=False,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(),
    )


def _draft(sizes: Sizes) -> EagleConfig:
    return EagleConfig(
        format="eagle-3",
        layer=_layer(sizes),
        num_layers=1,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=DRAFT_VOCABULARY,
        target_hidden_size=sizes.hidden_size,
        max_position_embeddings=1,
        aux_boundaries=TAPS,
        entry="qkv",
        has_fc=True,
    )
