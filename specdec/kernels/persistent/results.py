"""From sums to results: bias, SwiGLU, and out through shared memory."""

from specdec.kernels import barrier, constexpr_function, gl, gluon_jit, hopper


@gluon_jit
def finish(results, place, sums, N, num_written, VARIANT: gl.constexpr, GROUP: gl.constexpr):
    """Write an item's results; returns how many blocks of results the group has written."""
    split, n0, m0 = place
    n0 += GROUP * results.buffers.shape[3]
    TAILS: gl.constexpr = 2 if VARIANT.is_gated else 1
    ups: gl.constexpr = 1 if VARIANT.is_gated else 0
    y = _activated(sums[0], sums[ups], results.bias_ptr, n0, N, VARIANT)
    num_written = write(results, split, m0, n0, y, num_written, GROUP)
    if VARIANT.tail > 0:
        y = _activated(sums[TAILS], sums[TAILS + ups], results.bias_ptr, n0, N, VARIANT)
        num_written = write(results, split, m0 + sums[0].shape[1], n0, y, num_written, GROUP)
    return num_written


@gluon_jit
def result(results, sums, n0, N, VARIANT: gl.constexpr, IS_TAIL: gl.constexpr):
    """Compute what `finish` writes, of an item or its tail. n0: the group's first column."""
    ups: gl.constexpr = 1 if VARIANT.is_gated else 0
    FIRST: gl.constexpr = 1 + ups if IS_TAIL else 0
    y = _activated(sums[FIRST], sums[FIRST + ups], results.bias_ptr, n0, N, VARIANT)
    return y.to(results.desc.dtype)


@gluon_jit
def _activated(sums, up, bias_ptr, n0, N, VARIANT: gl.constexpr):
    """up: the sums themselves where nothing is gated."""
    if VARIANT.has_turns:
        HALF: gl.constexpr = sums.shape[0] // 16
        turns = sums.reshape([HALF, 2, 8, sums.shape[1]]).permute((0, 2, 3, 1))
        sums, up = turns.reshape([HALF * 8, sums.shape[1], 2]).split()
    if VARIANT.has_bias:
        sums += bias_beside(bias_ptr, n0, N, sums)
    if VARIANT.is_gated or VARIANT.has_turns:
        if VARIANT.has_bias:
            up += bias_beside(bias_ptr + N, n0, N, up)
        sums = gated(sums, up)
    return sums


@gluon_jit
def bias_beside(bias_ptr, n0, N, sums):
    """Load the bias as a column beside a tile of sums, float32."""
    n = n0 + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
    return gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]


@gluon_jit
def gated(sums, up):
    """sums / (1 + exp(-sums)) * up with the same bits as Triton's exp and division.

    Numerator and denominator are a quarter each, which moves no rounding, so that the reciprocal of
    the largest denominators is no subnormal number. Exponentials below 2^-126 become 0, as beside
    the 1 they do anyway.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 below, above;
            mul.rn.f32 below, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 below, below;
            fma.rn.f32 below, below, 0f3E800000, 0f3E800000;
            rcp.approx.ftz.f32 below, below;
            mul.rn.f32 above, $1, 0f3E800000;
            mul.rn.f32 above, above, below;
            mul.rn.f32 $0, above, $2;
        }""",
        "=f,f,f",
        [sums, up],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon_jit
def write(results, split, m0, n0, y, num_written, GROUP: gl.constexpr):
    """Write results [n, rows] to rows m0 on, a buffer at a time; each group's two take turns."""
    ROWS: gl.constexpr = y.shape[1]
    if results.buffers.shape[2] < ROWS:
        halves = y.reshape([y.shape[0], 2, ROWS // 2]).permute((0, 2, 1)).split()
        num_written = write(results, split, m0, n0, halves[0], num_written, GROUP)
        num_written = write(results, split, m0 + ROWS // 2, n0, halves[1], num_written, GROUP)
    else:
        buffer = results.buffers.index(GROUP * 2 + num_written % 2)
        hopper.tma.store_wait(1)
        barrier()
        buffer.reshape([ROWS, y.shape[0]]).permute((1, 0)).store(y.to(results.desc.dtype))
        if results.expert_rows > 0:
            barrier()
            _write_rows(results, split, m0, n0, buffer.reshape([ROWS, y.shape[0]]))
        else:
            hopper.fence_async_shared()
            barrier()
            hopper.tma.async_copy_shared_to_global(results.desc, [split, m0, n0], buffer)
        num_written += 1
    return num_written


@gluon_jit
def _write_rows(results, last, m0, n0, buffer):
    """Write an expert's results: a buffer's rows m0 on, as far as they are before the last."""
    N = results.sizes.N
    LAYOUT: gl.constexpr = _whole_lines(buffer.shape[1])
    m = m0 + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    n = n0 + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    row = m
    if results.slots > 0:
        pair = gl.load(results.pair_ptr + m, mask=m < last, other=0)
        row = pair % results.slots * results.sizes.T + pair // results.slots
    out = results.out_ptr + row.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(out, buffer.load(LAYOUT), mask=(m < last)[:, None] & (n < N)[None, :])


@constexpr_function
def _whole_lines(columns):
    """Lay out rows of 16-bit results in the registers of four warps, 16 bytes in each."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
