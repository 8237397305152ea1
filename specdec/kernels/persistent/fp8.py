"""The sums of an item in 8 bits, as fp8/sums.py orders them: each block's by themselves at first.

A group waits for a block's products and adds them to its sums, while the tensor cores multiply for
the other groups. Gate and up rows, and a tail, follow each other, in the same accumulators.
"""

from specdec.kernels import barrier, gl, gluon_jit, hopper
from specdec.kernels.fp8.promote import begun, channel_scaled, column_of_ring, promoted, row_of_ring
from specdec.kernels.persistent.blocks import rows_of_group, zeros
from specdec.kernels.sum_order import split_blocks


@gluon_jit
def fp8_split_sums(
    ring, step, sizes, place, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Sum the next split of an item; returns the sums, scaled, and the next step."""
    STAGES: gl.constexpr = VARIANT.num_stages
    nothing = zeros(ring, VARIANT, IS_CUT)
    sums = nothing
    for _i in range(split_blocks(sizes.K, ring.x.shape[2], VARIANT.splits)):
        at = step % STAGES
        hopper.mbarrier.wait(ring.ready.index(at), (step // STAGES) & 1)
        sums = _add_block(ring, at, sums, nothing, VARIANT, GROUP, IS_CUT)
        if VARIANT.form == "block":
            barrier()  # all warps have read the scales
        hopper.mbarrier.arrive(ring.empty.index(at))
        step += 1
    if VARIANT.form == "channel":
        sums = _scaled(ring, sums, place, sizes, VARIANT, GROUP)
    return sums, step


@gluon_jit
def _add_block(
    ring, at, sums, nothing, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Multiply one stage and add it to the sums."""
    w = rows_of_group(ring, at, VARIANT, GROUP)
    x = ring.x.index(at)
    if IS_CUT:
        x = x.slice(0, ring.x.shape[1] // VARIANT.cuts)
    AFTER: gl.constexpr = ring.x.shape[1]  # the tail's first row
    of_w = ring.w_scales
    of_up = ring.up_scales
    first = _added(ring, at, w, x, of_w, sums[0], nothing[0], VARIANT, GROUP, 0)
    if VARIANT.is_gated:
        up = ring.up.index(at).slice(GROUP * 64, 64)
        second = _added(ring, at, up, x, of_up, sums[1], nothing[1], VARIANT, GROUP, 0)
        if VARIANT.tail > 0:
            tail = ring.tail.index(at)
            third = _added(ring, at, w, tail, of_w, sums[2], nothing[2], VARIANT, GROUP, AFTER)
            last = _added(ring, at, up, tail, of_up, sums[3], nothing[3], VARIANT, GROUP, AFTER)
            return first, second, third, last
        else:
            return first, second
    elif VARIANT.tail > 0:
        tail = ring.tail.index(at)
        second = _added(ring, at, w, tail, of_w, sums[1], nothing[1], VARIANT, GROUP, AFTER)
        return first, second
    else:
        return (first,)


@gluon_jit
def _added(
    ring,
    at,
    w,
    x,
    w_scales,
    total,
    nothing,
    VARIANT: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Multiply tiles and add them to a sum. FIRST: of the stage's rows of x, that of this tile."""
    part = hopper.warpgroup_mma_wait(0, [begun(w, x.permute((1, 0)), nothing)])
    if VARIANT.form == "block":
        w_scale = column_of_ring(w_scales, at, total, GROUP * 64)
        x_scale = row_of_ring(ring.x_scales, at, total, FIRST)
        return promoted(total, part, w_scale, x_scale, "block")
    else:
        return promoted(total, part, total, total, "channel")


@gluon_jit
def _scaled(ring, sums, place, sizes, VARIANT: gl.constexpr, GROUP: gl.constexpr):
    """Multiply the sums of a split by the scales of the channel form."""
    _part, n0, m0 = place
    n0 += GROUP * 64
    x_at, w_at, up_at = ring.x_scales, ring.w_scales, ring.up_scales
    T, N = sizes.T, sizes.N
    first = channel_scaled(sums[0], x_at, w_at, m0, n0, T, N)
    m1 = m0 + sums[0].shape[1]
    if VARIANT.is_gated:
        second = channel_scaled(sums[1], x_at, up_at, m0, n0, T, N)
        if VARIANT.tail > 0:
            third = channel_scaled(sums[2], x_at, w_at, m1, n0, T, N)
            return first, second, third, channel_scaled(sums[3], x_at, up_at, m1, n0, T, N)
        else:
            return first, second
    elif VARIANT.tail > 0:
        return first, channel_scaled(sums[1], x_at, w_at, m1, n0, T, N)
    else:
        return (first,)
