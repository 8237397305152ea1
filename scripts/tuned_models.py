"""What tune_products.py measures: products of public models with an EAGLE-3 draft, or random ones.

The numbers are those of each model's config.json. A draft is one layer of its target's sizes with
32,000 tokens, as most published drafts are.
"""

import random
from typing import NamedTuple

from specdec.kernels.tile_shapes import Kind, Product
from specdec.models.products import products_of
from weights.config import PLAIN, ExpertsConfig, Forms, LayerKind, RopeConfig, TargetConfig
from weights.draft.config import EagleConfig

DRAFT_VOCABULARY = 32000
TAPS = (2, 8, 14)  # three of the target's layers; which ones makes no difference here

Span = tuple[int, int, int]  # from, to, step
SHAPES: tuple[tuple[Kind, Span, Span], ...] = (  # kind, N, K
    ("split", (1024, 8192, 64), (1024, 6144, 128)),
    ("gate", (4096, 40960, 128), (1024, 6144, 128)),
    ("whole", (32000, 160000, 64), (1024, 6144, 128)),
    ("split", (1024, 6144, 64), (4096, 20480, 128)),
    ("whole", (1024, 5120, 64), (3072, 15360, 128)),
)


class Sizes(NamedTuple):
    """The columns of KNOWN_MODELS, in order."""

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


IN_FP8 = "-fp8"  # ends the name of a model whose layers are FP8, in either form
CHANNELS = Forms(*["fp8 channel"] * len(Forms._fields))


def known_products(name: str) -> list[Product]:
    """List a known model's and its draft's products, in bfloat16 or with "-fp8" of it in FP8.

    ValueError: it is not known.
    """
    sizes = KNOWN_MODELS.get(name.removesuffix(IN_FP8))
    if sizes is None:
        names = ", ".join(KNOWN_MODELS)
        raise ValueError(f"model {name!r}: known are {names}, and each of them with {IN_FP8}")
    target = target_of(sizes, forms=CHANNELS if name.endswith(IN_FP8) else PLAIN)
    draft = EagleConfig(
        format="eagle-3",
        layer=target_of(sizes).layers[0],
        num_layers=1,
        vocab_size=target.vocab_size,
        draft_vocab_size=DRAFT_VOCABULARY,
        target_hidden_size=target.hidden_size,
        max_position_embeddings=1,
        aux_boundaries=TAPS,
        entry="qkv",
        has_fc=True,
    )
    return products_of(target, draft, "bfloat16")


def target_of(
    sizes: Sizes, experts: ExpertsConfig | None = None, forms: Forms = PLAIN
) -> TargetConfig:
    """Give a target of one layer with these sizes, and with experts an MLP of width 0."""
    of_layer = sizes._asdict()
    vocab_size = of_layer.pop("vocab_size")
    rope = RopeConfig()
    layer = LayerKind(**of_layer, rms_norm_eps=1e-6, rope=rope, experts=experts, forms=forms)
    return TargetConfig(
        model_type="llama",
        layers=(layer,),
        vocab_size=vocab_size,
        max_position_embeddings=1,
        has_tied_head=False,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(),
    )


def random_products(count: int, seed: int = 0) -> list[Product]:
    """Draw products of every kind in turn, in sizes that models have; one seed gives one list."""
    draw = random.Random(seed)
    rows = (SHAPES[i % len(SHAPES)] for i in range(count))
    return [
        Product(kind, *(draw.randrange(a, b + 1, step) for a, b, step in spans))
        for kind, *spans in rows
    ]
