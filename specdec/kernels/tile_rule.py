"""Tiles of products that no table knows."""

from specdec.kernels.tile_shapes import Product, Shape


def rule_splits(N: int, K: int) -> int:
    """Enough programs to keep every multiprocessor reading, with at least 1,024 of K in each."""
    fitting = (n for n in (2, 4) if K // n >= 1024 and N // 64 * n <= 264)
    return max(fitting, default=1)


def rule_shape(product: Product, rows: int, splits: int) -> Shape:
    """rows: a row class."""
    is_wide = product.dtype == "float32"
    block = 64 if is_wide or rows <= 64 else 128
    return Shape(
        block_n=64 if product.kind == "gate" else block,
        block_m=min(block, rows),
        block_k=32 if is_wide else (128 if product.K % 128 == 0 else 64),
        num_stages=3 if is_wide or rows > 64 else 4,
        num_warps=8 if block == 128 else 4,
    )
