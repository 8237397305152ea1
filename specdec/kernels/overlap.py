"""Programmatic dependent launch: a kernel is put on the GPU while the one before it drains, and waits for its end.

Every kernel calls `wait_for_inputs` before it touches memory, reads and writes alike, so that what runs ahead is its
start alone. PDL comes from `launch_options`: a Hopper GPU or later.
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
