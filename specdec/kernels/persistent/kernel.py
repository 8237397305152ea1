"""The kernel: the tuples that its functions share, a program's shared memory, and its warps' roles.

Kernels make such tuples with keywords: the key of Triton's cache has the text of kernels, but not
the order of a tuple's fields.
"""

from typing import NamedTuple

from specdec.kernels import gl, gluon_jit, hopper, tl
from specdec.kernels.persistent.blocks import zeros
from specdec.kernels.persistent.copying import copy_tiles, wait_for_inputs
from specdec.kernels.persistent.items import (
    extent_of,
    num_own,
    own_item,
    place_of_item,
    place_of_part,
)
from specdec.kernels.persistent.products import add_blocks, begin, sums_of_item, wait
from specdec.kernels.persistent.results import finish, result, write
from specdec.kernels.sum_order import split_blocks
from specdec.kernels.warp_roles import make_barriers, make_ring


class Variant(NamedTuple):
    """What a compiled kernel is for."""

    splits: int
    walked: int  # splits that a program adds to a part
    is_gated: bool
    has_bias: bool
    tail: int  # rows of x in a second tile beside the first
    cuts: int  # parts of a tile's rows in the last turn
    num_stages: int
    height: int  # columns of the results that a tile makes
    groups: int  # of four warps, with 64 rows of W each
    copy_registers: int
    is_late: bool  # 16-bit results leave while the next tile is multiplied
    has_turns: bool  # 8 gate and 8 up rows of W in turn: one product for both; is_gated is false
    form: str  # as in fp8/promote.py
    num_scales: int  # that come with a stage, float32
    is_shared: bool  # each 64 rows of W share their scales


class Sizes(NamedTuple):
    T: object
    N: object
    K: object


class Sources(NamedTuple):
    w: object
    up: object
    x: object
    rest: object
    x_scales: object
    w_scales: object
    up_scales: object


class Ring(NamedTuple):
    """Shared memory that is copied to: tiles for each stage, and its barriers."""

    w: object  # of three groups: a tile for each
    up: object  # w where nothing is gated
    x: object
    tail: object  # x where tiles have no tail
    ready: object  # the tiles have arrived
    empty: object  # all groups have multiplied them
    x_scales: object  # of the block form; else as they were given
    w_scales: object
    up_scales: object


class Results(NamedTuple):
    """Where sums go, and what is added to them before."""

    desc: object
    buffers: object  # shared memory for two blocks of each group
    bias_ptr: object


@gluon_jit(varying=("T",))
def persistent_kernel(
    out_desc,  # [parts, T, N] in blocks [1, rows, a group's columns]
    w_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K], or a group's rows at a time
    up_desc,  # the same
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    rest_desc,  # [T, K] in tiles of a tail, or of cut tiles
    bias_ptr,  # [N], or [2N] if gated
    x_scales,  # channel: [T]; block: [K / 128, T] in tiles of one group; plain: anything
    w_scales,  # channel: [N]; block: [K / 128, N] in tiles of one group
    up_scales,  # the same
    T,
    N,
    K,
    VARIANT: gl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    if needed_ptr is not None:
        wait_for_inputs()
        if gl.load(needed_ptr) == 0:
            return
    STAGES: gl.constexpr = VARIANT.num_stages
    w_ring = make_ring(w_desc, STAGES if VARIANT.groups == 2 else STAGES * VARIANT.groups)
    x_ring = make_ring(x_desc, STAGES)
    up_ring = make_ring(up_desc, STAGES) if VARIANT.is_gated else w_ring
    tail_ring = make_ring(rest_desc, STAGES) if VARIANT.tail > 0 else x_ring
    out_buffers = make_ring(out_desc, 2 * VARIANT.groups)
    if VARIANT.form == "block":
        scales = (
            make_ring(x_scales, STAGES),
            make_ring(w_scales, STAGES),
            make_ring(up_scales, STAGES) if VARIANT.is_gated else x_ring,
        )
    else:
        scales = (x_scales, w_scales, up_scales)
    ready, empty = make_barriers(STAGES, VARIANT.groups)
    hopper.fence_async_shared()
    sources = Sources(
        w=w_desc,
        up=up_desc,
        x=x_desc,
        rest=rest_desc,
        x_scales=x_scales,
        w_scales=w_scales,
        up_scales=up_scales,
    )
    ring = Ring(
        w=w_ring,
        up=up_ring,
        x=x_ring,
        tail=tail_ring,
        ready=ready,
        empty=empty,
        x_scales=scales[0],
        w_scales=scales[1],
        up_scales=scales[2],
    )
    results = Results(desc=out_desc, buffers=out_buffers, bias_ptr=bias_ptr)
    sizes = Sizes(T=T, N=N, K=K)
    if VARIANT.groups == 2:
        gl.warp_specialize(
            [
                (multiply, (results, ring, sizes, VARIANT, 0)),
                (multiply, (results, ring, sizes, VARIANT, 1)),
                (copy_tiles, (sources, ring, sizes, VARIANT)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[232, VARIANT.copy_registers],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (results, ring, sizes, VARIANT, 0)),
                (multiply, (results, ring, sizes, VARIANT, 1)),
                (multiply, (results, ring, sizes, VARIANT, 2)),
                (copy_tiles, (sources, ring, sizes, VARIANT)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, VARIANT.copy_registers],
        )


@gluon_jit
def multiply(results, ring, sizes, VARIANT: gl.constexpr, GROUP: gl.constexpr):
    """Multiply 64 rows of each tile of W, in four warps. GROUP: which 64 rows.

    First come the program's own items, then parts of the last turn. copying.py keeps this order.
    """
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
            sums, step = sums_of_item(ring, step, sizes, place, VARIANT, GROUP, False)
            num_written = finish(results, place, sums, sizes.N, num_written, VARIANT, GROUP)
    if VARIANT.cuts > 1:
        for i in range(gl.program_id(0), workload.num_cut, gl.num_programs(0)):
            place = place_of_part(i, ring, workload, VARIANT)
            sums, step = sums_of_item(ring, step, sizes, place, VARIANT, GROUP, True)
            num_written = finish(results, place, sums, sizes.N, num_written, VARIANT, GROUP)
    hopper.tma.store_wait(0)


@gluon_jit
def multiply_late(
    results, ring, sizes, workload, step, num_written, VARIANT: gl.constexpr, GROUP: gl.constexpr
):
    """Make a program's own items; returns the next step, and how many blocks are written.

    So that the tensor cores do not wait for results to leave, those of an item are held in
    registers, two in each, and are written during the next item's products, a piece beside each of
    the first blocks of K.
    """
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
