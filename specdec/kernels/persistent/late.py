"""Results that leave late, so that the tensor cores do not wait for them.

Those of an item are held in registers, two in each, and are written during the next item's
products, a piece beside each of the first blocks of K.
"""

from specdec.kernels import gl, gluon_jit, hopper
from specdec.kernels.persistent.items import num_own, own_item, place_of_item
from specdec.kernels.persistent.products import add_blocks, begin, wait, zeros
from specdec.kernels.persistent.results import result, write
from specdec.kernels.tiles import split_blocks


@gluon_jit
def multiply_late(
    results, ring, sizes, workload, step, num_written, VARIANT: gl.constexpr, GROUP: gl.constexpr
):
    """Make a program's own items; returns the next step, and how many blocks are written."""
    PIECES: gl.constexpr = ring.x.shape[1] // results.buffers.shape[2]
    split, n0 = 0, 0
    m0 = sizes.T  # below the last row: nothing is held yet, and nothing written
    nothing = zeros(ring, VARIANT, False)
    held = _packed(result(results, nothing, 0, sizes.N, VARIANT))
    for i in range(num_own(workload)):
        place = place_of_item(own_item(i), ring, workload, VARIANT)
        of_held = (split, n0, m0)
        sums, step, num_written = _sums(
            results, ring, step, sizes.K, held, of_held, num_written, VARIANT, GROUP
        )
        split, n0, m0 = place
        held = _packed(
            result(results, sums, n0 + GROUP * results.buffers.shape[3], sizes.N, VARIANT)
        )
    for i in gl.static_range(PIECES):
        num_written = _write_held(results, ring, (split, n0, m0), held, num_written, i, GROUP)
    return step, num_written


@gluon_jit
def _sums(
    results, ring, step, K, held, of_held, num_written, VARIANT: gl.constexpr, GROUP: gl.constexpr
):
    """Add up one split, while what is held leaves."""
    STAGES: gl.constexpr = VARIANT.num_stages
    PIECES: gl.constexpr = ring.x.shape[1] // results.buffers.shape[2]
    blocks = split_blocks(K, ring.x.shape[2], VARIANT.splits)
    sums = zeros(ring, VARIANT, False)
    for i in gl.static_range(PIECES):
        hopper.mbarrier.wait(ring.ready.index(step % STAGES), (step // STAGES) & 1)
        sums = begin(ring, step % STAGES, sums, i > 0, VARIANT, GROUP, False)
        num_written = _write_held(results, ring, of_held, held, num_written, i, GROUP)
        sums = wait(sums, 1)
        if i > 0:
            hopper.mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES))
        step += 1
    sums, step = add_blocks(ring, step, sums, blocks - PIECES, VARIANT, GROUP, False, True)
    return sums, step, num_written


@gluon_jit
def _packed(y):
    """Pack [n, rows] of 16 bits into [n, rows / 2] of 32, what a register holds."""
    even, odd = y.reshape([y.shape[0], y.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon_jit
def _write_held(results, ring, place, held, num_written, i: gl.constexpr, GROUP: gl.constexpr):
    split, n0, m0 = place
    PIECES: gl.constexpr = ring.x.shape[1] // results.buffers.shape[2]
    ROWS: gl.constexpr = results.buffers.shape[2]
    packed = _piece(held, i, PIECES)
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [packed],
        dtype=(results.desc.dtype, results.desc.dtype),
        is_pure=True,
        pack=1,
    )
    y = gl.join(even, odd).reshape([packed.shape[0], ROWS])
    n0 += GROUP * results.buffers.shape[3]
    return write(results, split, m0 + i * ROWS, n0, y, num_written, GROUP)


@gluon_jit
def _piece(y, i: gl.constexpr, PIECES: gl.constexpr):
    """Take the i-th of equal pieces along the rows, without a move between registers."""
    if PIECES == 1:
        return y
    else:
        halves = y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute((0, 2, 1)).split()
        HALF: gl.constexpr = PIECES // 2
        if i < HALF:
            return _piece(halves[0], i, HALF)
        else:
            return _piece(halves[1], i - HALF, HALF)
