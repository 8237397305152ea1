"""A stage's tile of W as a group multiplies it, and the tiles of sums, of nothing at first."""

from specdec.kernels import gl, gluon_jit


@gluon_jit
def zeros(ring, VARIANT: gl.constexpr, IS_CUT: gl.constexpr):
    """Begin sums of nothing."""
    BITS: gl.constexpr = ring.x.dtype.primitive_bitwidth
    rows = _tile(ring.x.shape[1] // (VARIANT.cuts if IS_CUT else 1), BITS)
    if VARIANT.tail > 0:
        tail = _tile(VARIANT.tail, BITS)
        if VARIANT.is_gated:
            return rows, rows, tail, tail
        else:
            return rows, tail
    elif VARIANT.is_gated:
        return rows, rows
    else:
        return (rows,)


@gluon_jit
def _tile(ROWS: gl.constexpr, BITS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 256 // BITS]
    )
    return gl.zeros([64, ROWS], gl.float32, LAYOUT)


@gluon_jit
def rows_of_group(ring, at, VARIANT: gl.constexpr, GROUP: gl.constexpr):
    if VARIANT.groups == 2:
        w = ring.w.index(at)
        if VARIANT.has_turns:
            w = w.reshape([128, ring.w.shape[4]])
        return w.slice(GROUP * 64, 64)
    else:
        w = ring.w.index(at * VARIANT.groups + GROUP)
        if VARIANT.has_turns:
            w = w.reshape([64, ring.w.shape[4]])
        return w
