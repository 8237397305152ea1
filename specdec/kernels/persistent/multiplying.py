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
def multiply(results, ring, sizes, FORM: gl.constexpr, GROUP: gl.constexpr):
    """GROUP: which 64 rows of W."""
    workload = extent_of(ring, sizes, FORM)
    step = 0
    num_written = 0
    tl.extra.cuda.gdc_wait()  # before results are written
    if FORM.is_late:
        step, num_written = multiply_late(
            results, ring, sizes, workload, step, num_written, FORM, GROUP
        )
    else:
        for i in range(num_own(workload)):
            place = place_of_item(own_item(i), ring, workload, FORM)
            sums, step = sums_of_item(ring, step, sizes.K, FORM, GROUP, False)
            num_written = finish(results, place, sums, sizes.N, num_written, FORM, GROUP)
    if FORM.cuts > 1:
        for i in range(gl.program_id(0), workload.num_cut, gl.num_programs(0)):
            place = place_of_part(i, ring, workload, FORM)
            sums, step = sums_of_item(ring, step, sizes.K, FORM, GROUP, True)
            num_written = finish(results, place, sums, sizes.N, num_written, FORM, GROUP)
    hopper.tma.store_wait(0)
