"""Which items of work a program has. An item is a tile of results: of one split, or of all walked.

First come whole items, in turns of all programs. Those of a last turn are cut into parts of their
rows, and so are items that end behind the last row of x, whose empty parts are nobody's. Or a relay
shares the items of the last two turns along K: a program begins with an item that it leaves to the
next program, makes some by itself, and ends with an item that it takes over. A relay's programs run
in groups, one for each tile of x, which read the same of W at a time.
"""

from typing import NamedTuple

from specdec.kernels import gl, gluon_jit
from specdec.kernels.tile_order import place_of, split_blocks


class Extent(NamedTuple):
    """How much work there is."""

    n_tiles: object  # of W
    m_tiles: object  # of x; where items are cut, those that have rows for all parts
    num_whole: object  # items that are made whole, in turns; a relay's: of each tile of x
    num_cut: object  # parts of the other items; a relay's: the items that are shared
    last_parts: object  # that the rows behind whole tiles of x fill, for each tile of W


class Share(NamedTuple):
    """A program's, of the items that a relay shares: as long as an item at least."""

    taken: object  # the item that is taken over
    taken_at: object  # the block of K to go on with; 0: none is taken over
    left: object  # the item that is left
    left_at: object  # the block of K where it is left; 0: none is


@gluon_jit
def extent_of(ring, sizes, FORM: gl.constexpr):
    BLOCK_M: gl.constexpr = ring.x.shape[1] + FORM.tail
    PART: gl.constexpr = BLOCK_M // FORM.cuts
    n_tiles = gl.cdiv(sizes.N, FORM.height)
    num_parts = gl.cdiv(sizes.T, PART)  # of x
    m_tiles = num_parts // FORM.cuts
    items = n_tiles * (FORM.splits // FORM.walked)  # of a tile of x
    last_parts = num_parts % FORM.cuts
    if FORM.is_relay:
        groups = gl.num_programs(0) // m_tiles
        num_whole = gl.maximum(items // groups - 1, 0) * groups
        num_cut = items - num_whole
    else:
        whole = items * m_tiles
        num_whole = whole if FORM.cuts == 1 else whole - whole % gl.num_programs(0)
        num_cut = (whole - num_whole) * FORM.cuts + items * last_parts
    return Extent(
        n_tiles=n_tiles,
        m_tiles=m_tiles,
        num_whole=num_whole,
        num_cut=num_cut,
        last_parts=last_parts,
    )


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
def place_of_item(item, ring, extent, FORM: gl.constexpr):
    """Its split, and its first row of W and of x."""
    BLOCK_M: gl.constexpr = ring.x.shape[1] + FORM.tail
    if FORM.is_relay:
        m0 = gl.program_id(0) % extent.m_tiles * BLOCK_M
        return item // extent.n_tiles, item % extent.n_tiles * FORM.height, m0
    else:
        tiles = gl.maximum(extent.n_tiles * extent.m_tiles, 1)
        n_tile, m_tile = place_of(item % tiles, extent.n_tiles, gl.maximum(extent.m_tiles, 1))
        return item // tiles, n_tile * FORM.height, m_tile * BLOCK_M


@gluon_jit
def place_of_part(i, ring, extent, FORM: gl.constexpr):
    """The same of the i-th part of a cut item: of the last turn, then of the last tile of x."""
    PART: gl.constexpr = ring.x.shape[1] // FORM.cuts
    items = extent.n_tiles * (FORM.splits // FORM.walked)  # of a tile of x
    of_turn = extent.num_cut - items * extent.last_parts
    split, n0, m0 = place_of_item(extent.num_whole + i // FORM.cuts, ring, extent, FORM)
    m0 += i % FORM.cuts * PART
    j = i - of_turn
    last_parts = gl.maximum(extent.last_parts, 1)
    item = j // last_parts
    last_m0 = extent.m_tiles * ring.x.shape[1] + j % last_parts * PART
    return (
        gl.where(j < 0, split, item // extent.n_tiles),
        gl.where(j < 0, n0, item % extent.n_tiles * FORM.height),
        gl.where(j < 0, m0, last_m0),
    )
