"""What a compiled kernel is for, and the tuples that its functions share.

Kernels make such tuples with keywords: the key of Triton's cache has the text of kernels, but not
the order of a tuple's fields.
"""

from typing import NamedTuple

BLOCK_N = 128  # rows of W in a tile of two groups
BLOCK_K = 64
OUT_ROWS = 32  # of a tile of results, in a buffer


class Variant(NamedTuple):
    """What a compiled kernel is for."""

    splits: int
    walked: int  # splits that a program adds; the others are its neighbours'
    is_gated: bool
    has_bias: bool
    tail: int  # rows of x in a second tile beside the first
    cuts: int  # parts of a tile's rows in the last turn
    num_stages: int
    height: int  # columns of the results that a tile makes
    groups: int  # of four warps, with 64 rows of W each
    copy_registers: int
    is_late: bool  # 16-bit results leave while the next tile is multiplied
    has_turns: bool  # 8 gate and 8 up rows of W in turn: one product for both; is_gated is false


class Sizes(NamedTuple):
    """The sizes of a product."""

    T: object
    N: object
    K: object


class Sources(NamedTuple):
    """Descriptors of what is copied."""

    w: object
    up: object
    x: object
    rest: object


class Ring(NamedTuple):
    """Shared memory that is copied to: tiles for each stage, and its barriers."""

    w: object  # of three groups: a tile for each
    up: object  # w where nothing is gated
    x: object
    tail: object  # x where tiles have no tail
    ready: object  # the tiles have arrived
    empty: object  # all groups have multiplied them


class Results(NamedTuple):
    """Where sums go, and what is added to them before."""

    desc: object
    buffers: object  # shared memory for two blocks of each group
    bias_ptr: object
