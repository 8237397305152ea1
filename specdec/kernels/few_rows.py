"""Products of few rows whose weights are on their way before their inputs are there.

A tile has the bits of linear.py and gate_up.py: 16 of K after another into one float32 accumulator.
But there are no more programs than a GPU holds at once, which make one tile after another, and one
warp of each lets the copy engine fill a ring, also with what the next tile needs while the others
store. It begins with weights, which no kernel writes: as many tiles as the ring holds, while the
kernel before this one still runs. It lets the next kernel start as soon as its last tiles are on
their way: a program of the next product comes when one of this has ended, and asks for its weights
while others still multiply and store, and while a norm is made of what they stored.
"""

from torch import Tensor

from specdec.kernels import (
    constexpr_function,
    gl,
    gluon_jit,
    hopper,
    is_hopper,
    num_multiprocessors,
    tl,
)
from specdec.kernels.fp8.promote import MOST_AT_ONCE, fp8_split_sums
from specdec.kernels.fp8.weight import Scales, form_of
from specdec.kernels.needed import need
from specdec.kernels.persistent.launch import describe, describe_scales
from specdec.kernels.persistent.results import bias_beside, gated
from specdec.kernels.sum_order import add_now, split_blocks
from specdec.kernels.tile_shapes import LEAST_SCALES, SCALE_BYTES, SHARED_MEMORY
from specdec.kernels.tiles import Tiles, num_tiles, place_of, rows_to_read
from specdec.kernels.warp_roles import make_barriers, make_ring

ROWS = 16, 32, 64  # of a tile
LEAST_ROW = 128  # bytes of a tile's row: what a swizzled tile has
LEAST_RING = 512  # bytes of a row; with 384 of them 64 rows were slower than in the older kernels
MOST_SUMS = 64  # registers of a thread
MOST_SUMS_FP8 = 96  # with accumulators of 128 of K
REGISTERS = 80  # of a thread on average; those that multiply get 136
BARRIER_BYTES = 1024


def has_few_rows(x_TK: Tensor, tiles: Tiles, is_gated: bool = False) -> bool:
    """Whether `launch_few_rows` serves a product; not those of passes that may not be needed."""
    size = x_TK.element_size()
    aligned = 16 // size
    is_fp8 = size == 1
    return (
        is_hopper(x_TK.device)
        and size <= 2
        and x_TK.shape[1] % aligned == x_TK.stride(0) % aligned == 0  # else linear.py complains
        and tiles.cuts == 0
        and not tiles.is_serial
        and tiles.block_m in ROWS
        and tiles.block_k * size >= LEAST_ROW
        and tiles.block_k * size * tiles.num_stages >= LEAST_RING
        and tiles.num_warps == 4
        and _sums(tiles, is_gated, is_fp8) <= (MOST_SUMS_FP8 if is_fp8 else MOST_SUMS)
        and _shared_bytes(tiles, is_gated, size) <= SHARED_MEMORY
        and need()["needed_ptr"] is None
    )


def _sums(tiles: Tiles, is_gated: bool, is_fp8: bool) -> int:
    """Count a thread's registers for sums and, of 8-bit products, accumulators."""
    of_tile = tiles.block_n * tiles.block_m // 128
    sums = of_tile * (2 if is_gated else 1)
    parts = sums if of_tile <= MOST_AT_ONCE else of_tile
    return sums * tiles.walked.bit_length() + (parts if is_fp8 else 0)


def _shared_bytes(tiles: Tiles, is_gated: bool, size: int) -> int:
    """Count a program's shared memory: the ring, results on their way out, barriers.

    size: bytes of a number
    """
    rows_of_w = tiles.block_n * (2 if is_gated else 1)
    stage = (rows_of_w + tiles.block_m) * tiles.block_k * size
    if size == 1:
        stage += SCALE_BYTES * (rows_of_w + max(tiles.block_m, LEAST_SCALES))
    results = tiles.block_n * tiles.block_m * (2 if is_gated else 4)
    return stage * tiles.num_stages + results + BARRIER_BYTES


def launch_few_rows(
    out: Tensor,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiles: Tiles,
    first: int = 0,
    is_gated: bool = False,
    scales: Scales | None = None,
) -> None:
    """Write [T, N], or the parts [parts, T, N].

    is_gated: gate rows of W before up rows. first: columns before it are left out.
    scales: of 8-bit x and W; None: they have 16 bits.
    No launch since the last synchronisation may write the weight.
    """
    T, K = x_TK.shape
    N = len(weight_NK) // (2 if is_gated else 1)
    x_desc = describe(x_TK, tiles.block_m, tiles.block_k)
    x_desc.shape[0] = rows_to_read(x_TK)
    halves = weight_NK[:N], weight_NK[-N:]
    w_descs = (describe(half, tiles.block_n, tiles.block_k) for half in halves)
    bias = weight_NK if bias_N is None else bias_N
    size = x_TK.element_size()
    most = num_multiprocessors(x_TK.device) * (
        SHARED_MEMORY // _shared_bytes(tiles, is_gated, size)
    )
    grid = (min(num_tiles(N - first, T, tiles), max(most // tiles.parts, 1)), tiles.parts)
    flags: dict[str, object] = {"IS_GATED": is_gated, "HAS_BIAS": bias_N is not None}
    flags |= {"SPLITS": tiles.splits, "WALKED": tiles.walked, "FORM": form_of(scales)}
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    places = describe_scales(scales, bias, N, tiles.block_n, max(tiles.block_m, LEAST_SCALES))
    few_rows_kernel[grid](
        *(out, x_desc, *w_descs, bias, *places, T, N, K, first),
        **flags,
        STAGES=tiles.num_stages,
        **options,
    )


@gluon_jit(varying=("T",))
def few_rows_kernel(
    out_ptr,  # [T, N], or [parts, T, N]
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    w_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K]
    up_desc,  # the same
    bias_ptr,  # [N], or [2N] if gated
    x_scales,  # channel: [T]; block: [K / 128, T] in tiles of one group; plain: anything
    w_scales,  # channel: [N]; block: [K / 128, N] in tiles of one group
    up_scales,  # the same
    T,
    N,
    K,
    first,  # column; those before it are left out
    IS_GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SPLITS: gl.constexpr,
    WALKED: gl.constexpr,  # of the splits, by a program
    FORM: gl.constexpr,  # as in fp8/promote.py
    STAGES: gl.constexpr,
):
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    where = (gl.program_id(1), first, tl.cdiv(N - first, BLOCK_N), tl.cdiv(T, BLOCK_M))
    w_ring = make_ring(w_desc, STAGES)
    x_ring = make_ring(x_desc, STAGES)
    up_ring = make_ring(up_desc, STAGES) if IS_GATED else w_ring
    scales = (x_scales, w_scales, up_scales)
    if FORM == "block":
        up_scale_ring = make_ring(up_scales, STAGES) if IS_GATED else x_ring
        scale_rings = (make_ring(x_scales, STAGES), make_ring(w_scales, STAGES), up_scale_ring)
    else:
        scale_rings = (x_ring, w_ring, up_ring)
    ready, empty = make_barriers(STAGES, 1)
    hopper.fence_async_shared()
    ring = (w_ring, up_ring, x_ring, ready, empty, scale_rings)
    outs = (out_ptr, bias_ptr, scales)
    descs = (x_desc, w_desc, up_desc, scales)
    sizes = (T, N, split_blocks(K, w_desc.block_type.shape[1], SPLITS))
    gl.warp_specialize(
        [
            (_multiply, (outs, ring, where, sizes, IS_GATED, HAS_BIAS, WALKED, FORM)),
            (_copy, (descs, ring, where, sizes, IS_GATED, WALKED, FORM)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[40],
    )


@gluon_jit
def _place(tile, where, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Find first column and row of the program's tile of this number."""
    _part, first, n_tiles, m_tiles = where
    n_tile, m_tile = place_of(gl.program_id(0) + tile * gl.num_programs(0), n_tiles, m_tiles)
    return first + n_tile * BLOCK_N, m_tile * BLOCK_M


@gluon_jit
def _count(where):
    tiles = where[2] * where[3] - gl.program_id(0)
    return tl.cdiv(tiles, gl.num_programs(0))


@gluon_jit
def _copy(
    descs, ring, where, sizes, IS_GATED: gl.constexpr, WALKED: gl.constexpr, FORM: gl.constexpr
):
    """Fill the ring, in one warp, weights first; a quotient for each stage would hold it up."""
    STAGES: gl.constexpr = ring[0].shape[0]
    BLOCK_N: gl.constexpr = ring[0].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    BLOCK_M: gl.constexpr = ring[2].shape[1]
    blocks = sizes[2] * WALKED
    start = where[0] * blocks * BLOCK_K
    ahead = gl.minimum(blocks, STAGES)
    n0, m0 = _place(0, where, BLOCK_N, BLOCK_M)
    for i in range(ahead):
        _copy_w(descs, ring, n0, start + i * BLOCK_K, i, IS_GATED, FORM)
    tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        _copy_x(descs, ring, m0, start + i * BLOCK_K, i, FORM)
    at = ahead
    turn = 1  # new barriers let it pass, as if their stages had been emptied
    for tile in range(_count(where)):
        n0, m0 = _place(tile, where, BLOCK_N, BLOCK_M)
        for i in range(gl.where(tile == 0, ahead, 0), blocks):
            turn ^= (at == STAGES).to(gl.int32)
            at = gl.where(at == STAGES, 0, at)
            k = start + i * BLOCK_K
            hopper.mbarrier.wait(ring[4].index(at), turn)
            _copy_w(descs, ring, n0, k, at, IS_GATED, FORM)
            _copy_x(descs, ring, m0, k, at, FORM)
            at += 1
    tl.extra.cuda.gdc_launch_dependents()


@gluon_jit
def _copy_w(descs, ring, n0, k, at, IS_GATED: gl.constexpr, FORM: gl.constexpr):
    """Copy a stage's tiles of W; its barrier learns how much comes with that of x."""
    _x_desc, w_desc, up_desc, scales = descs
    w_ring, up_ring, x_ring, ready, _empty, scale_rings = ring
    OF_W: gl.constexpr = w_ring.shape[1] * (2 if IS_GATED else 1)
    ROW: gl.constexpr = w_ring.shape[2] * w_ring.dtype.primitive_bitwidth // 8
    OF_SCALES: gl.constexpr = (OF_W + scale_rings[0].shape[2]) * 4 if FORM == "block" else 0
    bar = ready.index(at)
    hopper.mbarrier.expect(bar, (OF_W + x_ring.shape[1]) * ROW + OF_SCALES)
    hopper.tma.async_copy_global_to_shared(w_desc, [n0, k], bar, w_ring.index(at))
    if IS_GATED:
        hopper.tma.async_copy_global_to_shared(up_desc, [n0, k], bar, up_ring.index(at))
    if FORM == "block":
        g = k // w_ring.shape[2]
        hopper.tma.async_copy_global_to_shared(scales[1], [g, n0], bar, scale_rings[1].index(at))
        if IS_GATED:
            up_scales = scale_rings[2].index(at)
            hopper.tma.async_copy_global_to_shared(scales[2], [g, n0], bar, up_scales)


@gluon_jit
def _copy_x(descs, ring, m0, k, at, FORM: gl.constexpr):
    bar = ring[3].index(at)
    hopper.tma.async_copy_global_to_shared(descs[0], [m0, k], bar, ring[2].index(at))
    if FORM == "block":
        g = k // ring[2].shape[2]
        x_scales = ring[5][0].index(at)
        hopper.tma.async_copy_global_to_shared(descs[3][0], [g, m0], bar, x_scales)


@gluon_jit
def _multiply(
    outs,
    ring,
    where,
    sizes,
    IS_GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WALKED: gl.constexpr,
    FORM: gl.constexpr,
):
    """Sum the tiles, in four warps, and write them. They have x, so all before it has ended."""
    out_ptr, bias_ptr, scales = outs
    T, N, blocks = sizes
    BLOCK_N: gl.constexpr = ring[0].shape[1]
    BLOCK_M: gl.constexpr = ring[2].shape[1]
    for tile in range(_count(where)):
        first = tile * blocks * WALKED
        n0, m0 = _place(tile, where, BLOCK_N, BLOCK_M)
        place = (scales, m0, n0, T, N)
        acc, up = _sums_of(ring, first, blocks, place, IS_GATED, FORM, WALKED, WALKED)
        if HAS_BIAS:
            acc += bias_beside(bias_ptr, n0, N, acc)
            if IS_GATED:
                up += bias_beside(bias_ptr + N, n0, N, up)
        if IS_GATED:
            acc = gated(acc, up)
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        OUT: gl.constexpr = _rows_together(BLOCK_N, dtype.primitive_bitwidth)
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
        m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        out = out_ptr + where[0].to(gl.int64) * T * N + m.to(gl.int64)[None, :] * N + n[:, None]
        inside = (n < N)[:, None] & (m < T)[None, :]
        y = gl.convert_layout(acc.to(dtype), OUT)
        gl.store(out, y, mask=inside, eviction_policy="evict_last")  # as store_kept of kept.py


@gluon_jit
def _sums_of(
    ring,
    first,
    blocks,
    place,
    IS_GATED: gl.constexpr,
    FORM: gl.constexpr,
    WALKED: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Sum some splits of a tile as sum_order.py does. first: block; blocks: of a split."""
    if COUNT == 1:
        if FORM == "plain":
            return _split_sums(ring, first, blocks, IS_GATED)
        else:
            return fp8_split_sums(ring, first, blocks, place, IS_GATED, FORM, WALKED)
    else:
        HALF: gl.constexpr = (COUNT + 1) // 2
        low, _up = _sums_of(ring, first, blocks, place, IS_GATED, FORM, WALKED, HALF)
        after = first + HALF * blocks
        REST: gl.constexpr = COUNT - HALF
        high, _up = _sums_of(ring, after, blocks, place, IS_GATED, FORM, WALKED, REST)
        total = add_now(low, high)
        return total, total


@gluon_jit
def _split_sums(ring, first, blocks, IS_GATED: gl.constexpr):
    w_ring, up_ring, x_ring, ready, empty, _scales = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
    up = acc
    for j in range(blocks):
        i = first + j
        at = i % STAGES
        hopper.mbarrier.wait(ready.index(at), (i // STAGES) & 1)
        x = x_ring.index(at).permute((1, 0))
        acc = hopper.warpgroup_mma(w_ring.index(at), x, acc, use_acc=j > 0, is_async=True)
        if IS_GATED:
            up = hopper.warpgroup_mma(up_ring.index(at), x, up, use_acc=j > 0, is_async=True)
            acc, up = hopper.warpgroup_mma_wait(2, [acc, up])
        else:
            acc = hopper.warpgroup_mma_wait(1, [acc])
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=j > 0)
    if IS_GATED:
        acc, up = hopper.warpgroup_mma_wait(0, [acc, up])
    else:
        acc = hopper.warpgroup_mma_wait(0, [acc])
    hopper.mbarrier.arrive(empty.index((first + blocks - 1) % STAGES))
    return acc, up


@constexpr_function
def _rows_together(BLOCK_N, bits):
    """Lay out results [BLOCK_N, BLOCK_M] in the registers of four warps: 16 bytes of a row each."""
    each = 128 // bits
    lanes = min(BLOCK_N // each, 32)
    return gl.BlockedLayout([each, 1], [lanes, 32 // lanes], [1, 4], [0, 1])
