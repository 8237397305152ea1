"""What four warps do: their 64 rows of each tile of W by the rows of x, and out.

First come the program's own items, then parts of the last turn. copying.py keeps the same order.
"""

from specdec.kernels import gl, gluon_jit, hopper, tl
from specdec.kernels.persistent.items import (
    extent_of,
    num_own,
    own_item,
    place_of_item,
    place_of_part,
)
from specdec.kernels.persistent.late import multiply_late
from specdec.kernels.persistent.products import sums_of_item
from specdec.kernels.persistent.results import finish


@gluon_jit
def multiply(results, ring, sizes, VARIANT: gl.constexpr, GROUP: gl.constexpr):
    """GROUP: which 64 rows of W."""
    workload = extent_of(ring, sizes, VARIANT)
    step = 0
    num_written = 0
    tl.extra.cuda.gdc_wait()  # before results are written
    if VARIANT.is_late:
        step, num_written = multiply_late(
            results, ring, sizes, workload, step, num_written, VARIANT, GROUP
        )
    else:
        for i in range(num_own(workload)):
            place = place_of_item(own_item(i), ring, workload, VARIANT)
            sums, step = sums_of_item(ring, step, sizes.K, VARIANT, GROUP, False)
            num_written = finish(results, place, sums, sizes.N, num_written, VARIANT, GROUP)
    if VARIANT.cuts > 1:
        for i in range(gl.program_id(0), workload.num_cut, gl.num_programs(0)):
            place = place_of_part(i, ring, workload, VARIANT)
            sums, step = sums_of_item(ring, step, sizes.K, VARIANT, GROUP, True)
            num_written = finish(results, place, sums, sizes.N, num_written, VARIANT, GROUP)
    hopper.tma.store_wait(0)
