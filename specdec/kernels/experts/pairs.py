"""Which expert a program of the experts' products has, and its pairs of row and slot."""

from specdec.kernels import jit, tl


@jit
def of_tile(tile_ptr):
    """Return a tile's expert, -1 if it has no places, the first of these, and where they end."""
    first = tl.load(tile_ptr + 1, cache_modifier=".cg")
    last = tl.load(tile_ptr + 2, cache_modifier=".cg")
    expert = tl.load(tile_ptr, cache_modifier=".cg")
    return tl.where(first < last, expert, -1), first, last


@jit
def pairs_at(pair_ptr, first, last, COUNT: tl.constexpr):
    """Return the pairs at places from the first on, -1 from the last on."""
    place = first + tl.arange(0, COUNT)
    return tl.load(pair_ptr + place, mask=place < last, other=-1, cache_modifier=".cg")


@jit
def nth_expert(ids_ptr, P, j, E, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the j-th expert that has a pair, from 0 on, or -1."""
    p = tl.arange(0, BLOCK_P)
    e = tl.arange(0, BLOCK_E)
    ids = tl.load(ids_ptr + p, mask=p < P, other=E, cache_modifier=".cg")
    is_hit = (tl.histogram(ids, BLOCK_E) > 0) & (e < E)
    is_nth = is_hit & (tl.cumsum(is_hit.to(tl.int32), axis=0) == j + 1)
    return tl.max(tl.where(is_nth, e, -1), axis=0)


@jit
def ids_of_rows(ids_ptr, T, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Load the ids of rows; beyond the last row and slot they are -2."""
    t = tl.arange(0, BLOCK_M)[:, None]
    s = tl.arange(0, BLOCK_S)[None, :]
    inside = (t < T) & (s < SLOTS)
    return tl.load(ids_ptr + t * SLOTS + s, mask=inside, other=-2, cache_modifier=".cg")


@jit
def pairs_of_rows(ids, expert, SLOTS: tl.constexpr):
    """Return the pair of each row that has this expert, which is in one slot; else -1."""
    t = tl.arange(0, ids.shape[0])[:, None]
    s = tl.arange(0, ids.shape[1])[None, :]
    return tl.max(tl.where(ids == expert, t * SLOTS + s, -1), axis=1)


@jit
def rows_at(x_ptr, pair, stride_x, SLOTS: tl.constexpr, IS_GATED: tl.constexpr):
    """Return where the rows of pairs begin."""
    row = pair // SLOTS if IS_GATED else pair
    return x_ptr + row.to(tl.int64) * stride_x


@jit
def columns_of(x_at, pair, k, K, IS_WHOLE: tl.constexpr):
    """Load some of K of rows, as columns; zeros where there is no pair."""
    inside = (pair >= 0)[:, None]
    if not IS_WHOLE:
        inside = inside & (k < K)[None, :]
    return tl.trans(tl.load(x_at[:, None] + k[None, :], mask=inside, other=0.0))
