"""The items of work of a program. An item is a tile of results, of one part.

First come whole items, in turns of all programs. Items of a last turn are cut into parts of their
rows, and so are items that end after the last row of x, whose empty parts no program makes.
"""

from typing import NamedTuple

from specdec.kernels import gl, gluon_jit
from specdec.kernels.tiles import place_of


class Workload(NamedTuple):
    """How much work all programs have."""

    n_tiles: object  # of W
    m_tiles: object  # of x; where items are cut, those that have rows for all parts
    num_whole: object  # items that are made whole, in turns
    num_cut: object  # parts of the other items
    last_parts: object  # that the rows after whole tiles of x fill, for each tile of W


@gluon_jit
def extent_of(ring, sizes, VARIANT: gl.constexpr):
    BLOCK_M: gl.constexpr = ring.x.shape[1] + VARIANT.tail
    PART: gl.constexpr = BLOCK_M // VARIANT.cuts
    n_tiles = gl.cdiv(sizes.N, VARIANT.height)
    num_parts = gl.cdiv(sizes.T, PART)  # of x
    m_tiles = num_parts // VARIANT.cuts
    items = n_tiles * (VARIANT.splits // VARIANT.walked)  # of a tile of x
    last_parts = num_parts % VARIANT.cuts
    whole = items * m_tiles
    num_whole = whole if VARIANT.cuts == 1 else whole - whole % gl.num_programs(0)
    num_cut = (whole - num_whole) * VARIANT.cuts + items * last_parts
    return Workload(
        n_tiles=n_tiles,
        m_tiles=m_tiles,
        num_whole=num_whole,
        num_cut=num_cut,
        last_parts=last_parts,
    )


@gluon_jit
def num_own(workload):
    """Count the items that a program makes whole, without those of a cut last turn."""
    return gl.cdiv(workload.num_whole - gl.program_id(0), gl.num_programs(0))


@gluon_jit
def own_item(i):
    return gl.program_id(0) + i * gl.num_programs(0)


@gluon_jit
def place_of_item(item, ring, workload, VARIANT: gl.constexpr):
    """Find an item's part, and its first row of W and of x."""
    BLOCK_M: gl.constexpr = ring.x.shape[1] + VARIANT.tail
    tiles = gl.maximum(workload.n_tiles * workload.m_tiles, 1)
    n_tile, m_tile = place_of(item % tiles, workload.n_tiles, gl.maximum(workload.m_tiles, 1))
    return item // tiles, n_tile * VARIANT.height, m_tile * BLOCK_M


@gluon_jit
def place_of_part(i, ring, workload, VARIANT: gl.constexpr):
    """Find the i-th part of a cut item: of the last turn, then of the last tile of x."""
    PART: gl.constexpr = ring.x.shape[1] // VARIANT.cuts
    items = workload.n_tiles * (VARIANT.splits // VARIANT.walked)  # of a tile of x
    of_turn = workload.num_cut - items * workload.last_parts
    part, n0, m0 = place_of_item(workload.num_whole + i // VARIANT.cuts, ring, workload, VARIANT)
    m0 += i % VARIANT.cuts * PART
    j = i - of_turn
    last_parts = gl.maximum(workload.last_parts, 1)
    item = j // last_parts
    last_m0 = workload.m_tiles * ring.x.shape[1] + j % last_parts * PART
    return (
        gl.where(j < 0, part, item // workload.n_tiles),
        gl.where(j < 0, n0, item % workload.n_tiles * VARIANT.height),
        gl.where(j < 0, m0, last_m0),
    )
