"""A logit as support_floor sees it: a value, a key, a mass and a bin.

value: logit / temperature; -inf for what is not finite, which counts as masked.
key:   an integer in the order of the values, so that a search between two keys ends at a value.
mass:  exp(value - top) in whole parts of 2^-40, so that the order of a sum does not matter.
bin:   the distance below the row's top: 96 bins of 1/8, 31 of 5/8, and a last one for all that is
       further away, where masses are 0 and tokens are not counted.
"""

from specdec.kernels import jit, tl

MASS = 2.0**40
NUM_BINS = 128


@jit
def has_limit(temperature, t, log_min_p_ptr, top_k_ptr, top_p_ptr):
    """Whether row t may keep less than everything."""
    has_min_p = tl.load(log_min_p_ptr + t) > float("-inf")
    has_top_k = tl.load(top_k_ptr + t) > 0
    return (temperature > 0.0) & (has_min_p | has_top_k | (tl.load(top_p_ptr + t) < 1.0))


@jit
def load_values(row_ptr, start, V, temperature, BLOCK: tl.constexpr):
    """Load the values of BLOCK columns from `start`."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < V, other=float("-inf"))
    x = tl.where(x < float("inf"), x, float("-inf"))
    if temperature != 1.0:
        x = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + temperature)
    return x


@jit
def row_top(tops_ptr, tiles, TILES: tl.constexpr):
    """Find the greatest value of a row, from those of its tiles."""
    i = tl.arange(0, TILES)
    return tl.max(tl.load(tops_ptr + i, mask=i < tiles, other=float("-inf")), axis=0)


@jit
def key_of(x):
    """Map a value to its key; -0.0 has the key of 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of(key):
    """Map a key back to its value; -inf for a key that no value has."""
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(x > float("-inf"), x, float("-inf"))


@jit
def least_key():
    return tl.full((), -2147483648, tl.int64)


@jit
def mass_of(x, top):
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@jit
def bin_at(distance, NUM_BINS: tl.constexpr):
    distance = tl.minimum(distance, 40.0)
    near, far = (distance * 8.0).to(tl.int32), 96 + ((distance - 12.0) * 1.6).to(tl.int32)
    return tl.minimum(tl.where(distance < 12.0, near, far), NUM_BINS - 1)


@jit
def edge_of(bin):
    """Find how far below the top a bin begins."""
    bin = bin.to(tl.float32)
    return tl.where(bin < 96.0, bin * 0.125, 12.0 + (bin - 96.0) * 0.625)
