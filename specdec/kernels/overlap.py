"""Programmatic dependent launch: a kernel is put on the GPU while the one before it runs, and waits there for its end.

Every kernel calls `wait_for_inputs` before it touches memory, reads and writes alike, so that what runs ahead is its
start alone. Small kernels let the next one start at once; products do so when their loop is over, since programs that
wait would take the places of those that read. PDL comes from `launch_options`: a Hopper GPU or later.

Tried and dropped: asking for the first weights (prefetch.global.L2) before the wait costs 1 to 3 % of a decode pass.
Asking for the next product's (cp.async.bulk.prefetch.L2) from programs beside the small kernels, when the memory has
nothing else to do: 0 to 2 %.
"""

from specdec.kernels import jit, tl


@jit
def wait_for_inputs(PDL: tl.constexpr):
    """Until all kernels before this one have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def let_the_next_start(PDL: tl.constexpr):
    """Once every program has called it, the next kernel may take free places."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
