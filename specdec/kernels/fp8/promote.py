"""What kernels in Gluon do with a block's accumulators: the order of sums.py, with its bits.

FORM: "plain" (numbers of 16 bits, without scales), "channel" or "block".
"""

from specdec.kernels import HAS_TRITON, barrier, constexpr_function, gl, gluon_jit, hopper
from specdec.kernels.fp8.sums import times
from specdec.kernels.sum_order import add_now

MOST_REGISTERS = 104  # of a thread for sums and accumulators
MOST_AT_ONCE = 16  # registers of a thread for a tile of which gate and up are made at once
AT_ONCE: int = gl.constexpr(MOST_AT_ONCE) if HAS_TRITON else 0  # to kernels


@gluon_jit
def promoted(total, part, w_scale, x_scale, FORM: gl.constexpr):
    """Add what 128 of K have summed up. Scales beside the tile: [rows, 1] and [1, columns].

    Where all rows share a scale, [1, 1], its product with those of x is made once for all.
    """
    if FORM == "block":
        return gl.fma(part, w_scale * x_scale, total)
    else:
        return add_now(total, part)


@gluon_jit
def column_of_ring(ring, at, tile, first: gl.constexpr, COUNT: gl.constexpr):
    """Load COUNT scales of W from a ring, as a column beside the tile. first: row of the ring's."""
    scales = ring.index(at).slice(first, COUNT, dim=1)
    return scales.permute((1, 0)).load(tile.type.layout)


@gluon_jit
def row_of_ring(ring, at, tile, first: gl.constexpr):
    """Load scales of x from a ring, as a row above the tile. first: of the ring's."""
    return ring.index(at).slice(first, tile.shape[1], dim=1).load(tile.type.layout)


@gluon_jit
def channel_scaled(total, x_scales_ptr, w_scales_ptr, m0, n0, T, N):
    """Multiply a split's sum by the scales of rows of x, then of W."""
    m = m0 + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
    n = n0 + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))
    x_scale = gl.load(x_scales_ptr + m, mask=m < T, other=0.0, cache_modifier=".cg")
    w_scale = gl.load(w_scales_ptr + n, mask=n < N, other=0.0)
    return times(times(total, x_scale[None, :]), w_scale[:, None])


@gluon_jit
def fp8_split_sums(
    ring,
    first,
    blocks,
    place,
    IS_GATED: gl.constexpr,
    FORM: gl.constexpr,
    WALKED: gl.constexpr,
):
    """Sum a split of an 8-bit product as fp8/sums.py does: each block by itself at first."""
    w_ring, _up_ring, x_ring, _ready, _empty, _scale_rings = ring
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    AT_ONCE: gl.constexpr = stages_at_once(
        BLOCK_N * BLOCK_M // 128, IS_GATED, WALKED, w_ring.shape[0]
    )
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
    acc, up = zeros, zeros
    whole = blocks // AT_ONCE
    for j in range(whole):
        step = first + j * AT_ONCE
        acc, up = _add_stages(ring, step, acc, up, zeros, IS_GATED, FORM, AT_ONCE)
    if AT_ONCE > 1:
        for j in range(whole * AT_ONCE, blocks):
            acc, up = _add_stages(ring, first + j, acc, up, zeros, IS_GATED, FORM, 1)
    if FORM == "channel":
        scales, m0, n0, T, N = place
        acc = channel_scaled(acc, scales[0], scales[1], m0, n0, T, N)
        if IS_GATED:
            up = channel_scaled(up, scales[0], scales[2], m0, n0, T, N)
    return acc, up


@constexpr_function
def stages_at_once(of_tile, is_gated, walked, stages):
    """Choose of how many stages products run at once: half a ring, if registers hold them.

    A product of few rows takes longer to begin and to end than to multiply. of_tile: registers
    """
    parts = of_tile * (2 if is_gated else 1)
    if is_gated and of_tile > MOST_AT_ONCE:
        return 1  # its gate and up rows take turns
    left = MOST_REGISTERS - parts * walked.bit_length()
    return max(n for n in (1, 2, 4) if n == 1 or (n * parts <= left and 2 * n <= stages))


@gluon_jit
def _add_stages(
    ring, step, acc, up, zeros, IS_GATED: gl.constexpr, FORM: gl.constexpr, COUNT: gl.constexpr
):
    """Multiply some stages at once, and add them in their order."""
    STAGES: gl.constexpr = ring[0].shape[0]
    empty = ring[4]
    OF_STAGE: gl.constexpr = 2 if IS_GATED else 1  # products in flight
    a = _begin_stage(ring, step, zeros, IS_GATED)
    if COUNT > 1:
        b = _begin_stage(ring, step + 1, zeros, IS_GATED)
    if COUNT > 2:
        c = _begin_stage(ring, step + 2, zeros, IS_GATED)
        d = _begin_stage(ring, step + 3, zeros, IS_GATED)
    PENDING: gl.constexpr = (COUNT - 1) * OF_STAGE
    acc, up = _end_stage(ring, step, a, acc, up, zeros, IS_GATED, FORM, PENDING)
    if COUNT > 2:
        acc, up = _end_stage(ring, step + 1, b, acc, up, zeros, IS_GATED, FORM, 2 * OF_STAGE)
        acc, up = _end_stage(ring, step + 2, c, acc, up, zeros, IS_GATED, FORM, OF_STAGE)
        acc, up = _end_stage(ring, step + 3, d, acc, up, zeros, IS_GATED, FORM, 0)
    elif COUNT > 1:
        acc, up = _end_stage(ring, step + 1, b, acc, up, zeros, IS_GATED, FORM, 0)
    barrier()  # all warps have multiplied, and have read the scales
    for i in gl.static_range(COUNT):
        hopper.mbarrier.arrive(empty.index((step + i) % STAGES))
    return acc, up


@gluon_jit
def _begin_stage(ring, step, zeros, IS_GATED: gl.constexpr):
    """Begin the products of a stage; of gate rows alone where the up rows follow later."""
    w_ring, up_ring, x_ring, ready, _empty, _scale_rings = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    at = step % STAGES
    hopper.mbarrier.wait(ready.index(at), (step // STAGES) & 1)
    x = x_ring.index(at).permute((1, 0))
    part = begun(w_ring.index(at), x, zeros)
    if IS_GATED and zeros.shape[0] * zeros.shape[1] <= 128 * AT_ONCE:
        return part, begun(up_ring.index(at), x, zeros)
    else:
        return part, part


@gluon_jit
def _end_stage(
    ring,
    step,
    parts,
    acc,
    up,
    zeros,
    IS_GATED: gl.constexpr,
    FORM: gl.constexpr,
    PENDING: gl.constexpr,
):
    """Add the products of a stage, once no more than PENDING others run."""
    w_ring, up_ring, x_ring, _ready, _empty, scale_rings = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    IS_AT_ONCE: gl.constexpr = zeros.shape[0] * zeros.shape[1] <= 128 * AT_ONCE
    at = step % STAGES
    if IS_GATED and IS_AT_ONCE:
        part, up_part = hopper.warpgroup_mma_wait(PENDING, [parts[0], parts[1]])
    else:
        part = hopper.warpgroup_mma_wait(PENDING, [parts[0]])
    w_scale, x_scale = stage_scales(scale_rings, 1, at, acc, FORM)
    acc = promoted(acc, part, w_scale, x_scale, FORM)
    if IS_GATED:
        if not IS_AT_ONCE:
            up_part = begun(up_ring.index(at), x_ring.index(at).permute((1, 0)), zeros)
            up_part = hopper.warpgroup_mma_wait(0, [up_part])
        w_scale, x_scale = stage_scales(scale_rings, 2, at, acc, FORM)
        up = promoted(up, up_part, w_scale, x_scale, FORM)
    return acc, up


@gluon_jit
def begun(w, x, zeros):
    """Begin to multiply a block, in accumulators of its own. zeros: as they are at first."""
    return hopper.warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)


@gluon_jit
def stage_scales(rings, WHICH: gl.constexpr, at, tile, FORM: gl.constexpr):
    """Load a stage's scales, of W or its up rows and of x; the tile itself where it has none."""
    if FORM == "block":
        w_scale = column_of_ring(rings[WHICH], at, tile, 0, tile.shape[0])
        return w_scale, row_of_ring(rings[0], at, tile, 0)
    else:
        return tile, tile
