"""Products of no known model, to see how far the rule is from what tuning finds."""

import random

from specdec.kernels.tile_shapes import Kind, Product

Span = tuple[int, int, int]  # from, to, step
SHAPES: tuple[tuple[Kind, Span, Span], ...] = (  # kind, N, K
    ("split", (1024, 8192, 64), (1024, 6144, 128)),
    ("gate", (4096, 40960, 128), (1024, 6144, 128)),
    ("whole", (32000, 160000, 64), (1024, 6144, 128)),
    ("split", (1024, 6144, 64), (4096, 20480, 128)),
    ("whole", (1024, 5120, 64), (3072, 15360, 128)),
)


def random_products(count: int, seed: int = 0) -> list[Product]:
    """Draw products of every kind in turn, in sizes that models have; one seed gives one list."""
    draw = random.Random(seed)
    rows = (SHAPES[i % len(SHAPES)] for i in range(count))
    return [Product(kind, _of(draw, Ns), _of(draw, Ks)) for kind, Ns, Ks in rows]


def _of(draw: random.Random, span: Span) -> int:
    low, high, step = span
    return draw.randrange(low, high + 1, step)
