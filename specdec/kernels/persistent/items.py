"""Which items of work a program has. An item is a tile of results: of one split, or of all walked.

First come whole items, in turns of all programs. Those of a last turn are cut into parts of their
rows; or a relay shares those of the last two turns along K: a program begins with an item that it
leaves to the next program, makes some by itself, and ends with an item that it takes over. A
relay's programs run in groups, one for each tile of x, which read the same of W at a time.
"""

from typing import NamedTuple

from specdec.kernels import gl, gluon_jit
from specdec.kernels.tile_order import place_of, split_blocks


class Extent(NamedTuple):
    """How much work there is."""

    n_tiles: object  # of W
    m_tiles: object  # of x
    num_whole: object  # items that are made whole, in turns; a relay's: of each tile of x
    num_cut: object  # parts of the other items; a relay's: the items that are shared


class Share(NamedTuple):
    """A program's, of the items that a relay shares: as long as an item at least."""

    taken: object  # the item that is taken over
    taken_at: object  # the block of K to go on with; 0: none is taken over
    left: object  # the item that is left
    left_at: object  # the block of K where it is left; 0: none is


@gluon_jit
def extent_of(ring, sizes, FORM: gl.constexpr):
    n_tiles = gl.cdiv(sizes.N, FORM.height)
    m_tiles = gl.cdiv(sizes.T, ring.x.shape[1] + FORM.tail)
    items = n_tiles * (FORM.splits // FORM.walked)
    if FORM.is_relay:
        groups = gl.num_programs(0) // m_tiles
        num_whole = gl.maximum(items // groups - 1, 0) * groups
        num_cut = items - num_whole
    else:
        items *= m_tiles
        num_whole = items if FORM.cuts == 1 else items - items % gl.num_programs(0)
        num_cut = (items - num_whole) * FORM.cuts
    return Extent(n_tiles=n_tiles, m_tiles=m_tiles, num_whole=num_whole, num_cut=num_cut)


@gluon_jit
def share_of(extent, ring, sizes, FORM: gl.constexpr):
    group = gl.program_id(0) // extent.m_tiles
    groups = gl.num_programs(0) // extent.m_tiles
    blocks = split_blocks(sizes.K, ring.x.shape[2], FORM.splits)
    first = group * extent.num_cut * blocks // groups
    end = (group + 1) * extent.num_cut * blocks // groups
    return Share(
        taken=extent.num_whole + first // blocks,
        taken_at=first % blocks,
        left=extent.num_whole + end // blocks,
        left_at=end % blocks,
    )


@gluon_jit
def num_own(extent, share, FORM: gl.constexpr):
    """How many items a program makes from beginning to end, without those of a cut last turn."""
    if FORM.is_relay:
        in_turns = extent.num_whole // (gl.num_programs(0) // extent.m_tiles)
        return in_turns + share.left - _first_own(share)
    else:
        return gl.cdiv(extent.num_whole - gl.program_id(0), gl.num_programs(0))


@gluon_jit
def own_item(i, extent, share, FORM: gl.constexpr):
    """Which item is the program's i-th."""
    if FORM.is_relay:
        groups = gl.num_programs(0) // extent.m_tiles
        in_turn = gl.program_id(0) // extent.m_tiles + i * groups
        turns = extent.num_whole // groups
        return gl.where(i < turns, in_turn, _first_own(share) + i - turns)
    else:
        return gl.program_id(0) + i * gl.num_programs(0)


@gluon_jit
def _first_own(share):
    """The first item of a relay's share that begins in it."""
    return share.taken + (share.taken_at > 0).to(gl.int32)


@gluon_jit
def place_of_item(item, ring, extent, FORM: gl.constexpr, IS_CUT: gl.constexpr):
    """Its split, and its first row of W and of x. Cut items are counted by themselves."""
    CUTS: gl.constexpr = FORM.cuts if IS_CUT else 1
    BLOCK_M: gl.constexpr = ring.x.shape[1]
    HEIGHT: gl.constexpr = FORM.height
    if FORM.is_relay:
        m0 = gl.program_id(0) % extent.m_tiles * (BLOCK_M + FORM.tail)
        return item // extent.n_tiles, item % extent.n_tiles * HEIGHT, m0
    else:
        tile = item // CUTS
        tiles = extent.n_tiles * extent.m_tiles
        n_tile, m_tile = place_of(tile % tiles, extent.n_tiles, extent.m_tiles)
        m0 = m_tile * (BLOCK_M + FORM.tail) + item % CUTS * (BLOCK_M // CUTS)
        return tile // tiles, n_tile * HEIGHT, m0
