"""The sums of an item in 8 bits, as fp8/sums.py orders them: each block's by themselves at first.

A group waits for a block's products and adds them to its sums, while the tensor cores multiply for
the other groups. Gate and up rows, and a tail, follow each other, in the same accumulators.
"""

from specdec.kernels import barrier, constexpr_function, gl, gluon_jit, hopper
from specdec.kernels.fp8.promote import begun, channel_scaled, column_of_ring, promoted, row_of_ring
from specdec.kernels.persistent.blocks import rows_of_group, zeros
from specdec.kernels.sum_order import split_blocks


@gluon_jit
def fp8_split_sums(
    ring, step, sizes, place, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Sum the next split of an item; returns the sums, scaled, and the next step."""
    nothing = zeros(ring, VARIANT, IS_CUT)
    sums = nothing
    blocks = split_blocks(sizes.K, ring.x.shape[2], VARIANT.splits)
    pairs = 0
    if has_pairs(ring.x.shape[1], VARIANT):
        pairs = blocks // 2
        for _i in range(pairs):
            sums = _add_pair(ring, step, sums, nothing, VARIANT, GROUP, IS_CUT)
            step += 2
    for _i in range(blocks - 2 * pairs):
        at = step % VARIANT.num_stages
        _await(ring, step, VARIANT)
        sums = _add_block(ring, at, sums, nothing, VARIANT, GROUP, IS_CUT)
        if VARIANT.form == "block":
            barrier()  # all warps have read the scales
        hopper.mbarrier.arrive(ring.empty.index(at))
        step += 1
    if VARIANT.form == "channel":
        sums = _scaled(ring, sums, place, sizes, VARIANT, GROUP)
    return sums, step


@constexpr_function
def has_pairs(rows, variant):
    """Whether registers hold the accumulators of two blocks: one is added while one is multiplied.

    rows: of x in a tile. A split that waits may leave registers, between loops; but in the block
    form, which needs more, compilers would move others, too.
    """
    if variant.is_gated or variant.tail > 0:
        return False
    held = rows // 2 * (variant.walked.bit_length() + 2)
    if variant.groups == 3:
        return held <= 112
    return held <= (192 if variant.form == "block" else 256)


@gluon_jit
def _add_pair(
    ring, step, sums, nothing, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Multiply two stages and add them, the first while the second is multiplied."""
    STAGES: gl.constexpr = VARIANT.num_stages
    first = step % STAGES
    second = (step + 1) % STAGES
    a = _begin_block(ring, step, nothing[0], VARIANT, GROUP, IS_CUT)
    b = _begin_block(ring, step + 1, nothing[0], VARIANT, GROUP, IS_CUT)
    a = hopper.warpgroup_mma_wait(1, [a])
    total = _promoted(ring, first, ring.w_scales, sums[0], a, VARIANT, GROUP, 0)
    if VARIANT.form == "block":
        barrier()  # all warps have read the scales
    hopper.mbarrier.arrive(ring.empty.index(first))
    b = hopper.warpgroup_mma_wait(0, [b])
    total = _promoted(ring, second, ring.w_scales, total, b, VARIANT, GROUP, 0)
    if VARIANT.form == "block":
        barrier()
    hopper.mbarrier.arrive(ring.empty.index(second))
    return (total,)


@gluon_jit
def _begin_block(
    ring, step, nothing, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    at = step % VARIANT.num_stages
    _await(ring, step, VARIANT)
    x = ring.x.index(at)
    if IS_CUT:
        x = x.slice(0, ring.x.shape[1] // VARIANT.cuts)
    return begun(rows_of_group(ring, at, VARIANT, GROUP), x.permute((1, 0)), nothing)


@gluon_jit
def _await(ring, step, VARIANT: gl.constexpr):
    STAGES: gl.constexpr = VARIANT.num_stages
    hopper.mbarrier.wait(ring.ready.index(step % STAGES), (step // STAGES) & 1)


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
    return _promoted(ring, at, w_scales, total, part, VARIANT, GROUP, FIRST)


@gluon_jit
def _promoted(
    ring,
    at,
    w_scales,
    total,
    part,
    VARIANT: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Add a block's sums. FIRST: of the stage's rows of x, that of this tile."""
    if VARIANT.form == "block":
        COUNT: gl.constexpr = 1 if VARIANT.is_shared else 64
        return _by_halves(w_scales, ring.x_scales, at, total, part, GROUP * 64, FIRST, COUNT)
    else:
        return promoted(total, part, total, total, "channel")


@gluon_jit
def _by_halves(
    w_scales,
    x_scales,
    at,
    total,
    part,
    ROW: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Add a block's sums, half of the columns at a time, lest all scales are in registers."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    if COLUMNS <= 32:
        w_scale = column_of_ring(w_scales, at, total, ROW, COUNT)
        x_scale = row_of_ring(x_scales, at, total, FIRST)
        return promoted(total, part, w_scale, x_scale, "block")
    else:
        HALF: gl.constexpr = COLUMNS // 2
        low, high = total.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        low_part, high_part = part.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        low = _by_halves(w_scales, x_scales, at, low, low_part, ROW, FIRST, COUNT)
        at = _known_later(at)
        high = _by_halves(w_scales, x_scales, at, high, high_part, ROW, FIRST + HALF, COUNT)
        joined = gl.join(low, high).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
        return gl.convert_layout(joined, total.type.layout, assert_trivial=True)


@gluon_jit
def _known_later(at):
    """Keep what comes before in its place: compilers load no scale of the next half earlier.

    A move alone keeps the compiler of PTX from nothing; a warp's barrier does, and costs nothing.
    """
    return gl.inline_asm_elementwise(
        """
        bar.warp.sync 0xffffffff;
        mov.b32 $0, $1;
        """,
        *("=r,r,~{memory}", [at]),
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


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
