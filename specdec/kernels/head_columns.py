"""The columns of a head, in a block of a power of two: Triton has no others.

Where head_dim is not one (96, say), columns beyond it are read as 0 and never written: they add
exact zeros to scores and to norms. A power of two from 16 on has no such columns, and no mask.
"""

from specdec.kernels import constexpr_function, jit, tl

# of a head's block: tiles of keys, of values and of 32 queries fill a Hopper GPU's shared memory
MOST_BYTES = 1024


@constexpr_function
def block_of(C):
    """Round the columns of a head up to a power of two, and to 16, a product's least."""
    return max(1 << (C - 1).bit_length(), 16)


@jit
def columns(C: tl.constexpr):
    return tl.arange(0, block_of(C))


@jit
def inside_columns(mask, C: tl.constexpr):
    """Make a mask of rows [rows] one of rows and columns; [rows, 1] where a block has no others."""
    both = mask[:, None]
    if block_of(C) != C:
        both = both & (columns(C) < C)[None, :]
    return both
