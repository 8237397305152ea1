"""The place of a program's tile in a product, and the number of blocks of K in its split."""

from specdec.kernels import jit, tl
from specdec.kernels.tiles import Tiles


def num_tiles(N: int, T: int, tiles: Tiles) -> int:
    """Count the output tiles of a product; `place_of` numbers them."""
    return -(-N // tiles.block_n) * -(-T // tiles.block_m)


@jit
def place_of(tile, n_tiles, m_tiles):
    """Place tiles in bands along the rows, rows first: programs that share W tiles run together."""
    BAND: tl.constexpr = 8
    band = tile // (BAND * n_tiles)
    height = tl.minimum(m_tiles - band * BAND, BAND)
    inside = tile % (BAND * n_tiles)
    return inside // height, band * BAND + inside % height


@jit
def split_blocks(K, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Count the blocks of K in a split, whose length is a multiple of 256 for every BLOCK_K."""
    return (
        tl.cdiv(tl.cdiv(K, 256), SPLITS) * (256 // BLOCK_K) if SPLITS > 1 else tl.cdiv(K, BLOCK_K)
    )
