"""What four warps do: their 64 rows of each tile of W by the rows of x, and out.

First a relay's sums that are left to the next program, then the program's own items, then parts of
the last turn, or the sums that are taken over. copying.py keeps the same order.
"""

from specdec.kernels import gl, gluon_jit, hopper, tl
from specdec.kernels.persistent.items import (
    extent_of,
    num_own,
    own_item,
    place_of_item,
    place_of_part,
    share_of,
)
from specdec.kernels.persistent.late import multiply_late
from specdec.kernels.persistent.products import add_blocks, sums_of_item, zeros
from specdec.kernels.persistent.relay import leave, take_over
from specdec.kernels.persistent.results import finish
from specdec.kernels.tile_order import split_blocks


@gluon_jit
def multiply(results, ring, sizes, FORM: gl.constexpr, GROUP: gl.constexpr):
    """GROUP: which 64 rows of W."""
    extent = extent_of(ring, sizes, FORM)
    share = share_of(extent, ring, sizes, FORM)
    step = 0
    num_written = 0
    tl.extra.cuda.gdc_wait()  # before flags are read and results written
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share.left_at > 0:
            sums = zeros(ring, FORM, False)
            sums, step = add_blocks(ring, step, sums, share.left_at, FORM, GROUP, False, False)
            leave(results, sums, FORM, GROUP)
    if FORM.is_late:
        step, num_written = multiply_late(
            results, ring, sizes, extent, share, step, num_written, FORM, GROUP
        )
    else:
        for i in range(num_own(extent, share, FORM)):
            place = place_of_item(own_item(i, extent, share, FORM), ring, extent, FORM)
            sums, step = sums_of_item(ring, step, sizes.K, FORM, GROUP, False)
            num_written = finish(results, place, sums, sizes.N, num_written, FORM, GROUP)
    if FORM.cuts > 1:
        for i in range(gl.program_id(0), extent.num_cut, gl.num_programs(0)):
            place = place_of_part(i, ring, extent, FORM)
            sums, step = sums_of_item(ring, step, sizes.K, FORM, GROUP, True)
            num_written = finish(results, place, sums, sizes.N, num_written, FORM, GROUP)
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share.taken_at > 0:
            place = place_of_item(share.taken, ring, extent, FORM)
            sums = take_over(results, zeros(ring, FORM, False), extent.m_tiles, FORM, GROUP)
            rest = split_blocks(sizes.K, ring.x.shape[2], FORM.splits) - share.taken_at
            sums, step = add_blocks(ring, step, sums, rest, FORM, GROUP, False, True)
            num_written = finish(results, place, sums, sizes.N, num_written, FORM, GROUP)
    hopper.tma.store_wait(0)
