"""The experts' products of few rows on a Hopper GPU, as few_rows.py: from a ring that stays full.

No more programs run than a GPU holds at once. Each makes one tile after another, of the experts
that have a row, and one warp lets the copy engine fill a ring, also with what the next tile needs
while the others store. The second product asks for its first weights while the first one still
runs: which experts have rows was known before that. All rows are columns of every tile, so that the
copy engine can fetch them; an expert's results of the first product are T rows of their own, and
only the second product looks up which rows have the expert, and in which slot.

Tiles have the bits of products.py.
"""

from torch import Tensor

from specdec.kernels import gl, gluon_jit, hopper, num_multiprocessors, tl
from specdec.kernels.experts.tiles import BESIDE_RING
from specdec.kernels.few_rows import REGISTERS, rows_together, shared_bytes
from specdec.kernels.persistent.launch import describe
from specdec.kernels.persistent.results import gated
from specdec.kernels.tile_shapes import SHARED_MEMORY, Shape
from specdec.kernels.tiles import cut, rows_to_read
from specdec.kernels.warp_roles import make_barriers, make_ring


def launch_ahead(
    x_TD: Tensor,
    ids_TS: Tensor,
    gate_up_EXD: Tensor,
    down_EDI: Tensor,
    shapes: tuple[Shape, Shape],
) -> Tensor:
    """Leave [k, T, D]. No launch since the last synchronisation may write the weights."""
    (T, k), (E, D, I) = ids_TS.shape, down_EDI.shape
    num_hit = min(E, T * k)  # at most
    h_XI = x_TD.new_empty(num_hit * T + shapes[1].block_m, I)
    y_STD = x_TD.new_empty(k, T, D)
    _launch(h_XI, x_TD, rows_to_read(x_TD), gate_up_EXD, ids_TS, shapes[0], is_gated=True)
    _launch(y_STD, h_XI, len(h_XI), down_EDI, ids_TS, shapes[1], is_gated=False)
    return y_STD


def _launch(
    out: Tensor,
    x_XK: Tensor,
    num_rows: int,
    weight_ENK: Tensor,
    ids_TS: Tensor,
    shape: Shape,
    is_gated: bool,
) -> None:
    (T, k), (E, N, K) = ids_TS.shape, weight_ENK.shape
    N //= 2 if is_gated else 1
    x_desc = describe(x_XK, shape.block_m, shape.block_k)
    x_desc.shape[0] = num_rows
    w_desc = describe(weight_ENK.flatten(0, 1), shape.block_n, shape.block_k)
    beside = SHARED_MEMORY // (shared_bytes(cut(shape, T, 1), is_gated) + BESIDE_RING)
    most_tiles = min(E, T * k) * -(-N // shape.block_n)
    grid = (min(most_tiles, num_multiprocessors(x_XK.device) * beside),)
    blocks = {"BLOCK_E": power_of_2(E + 1), "BLOCK_P": power_of_2(shape.block_m * k)}
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    flags = {"IS_GATED": is_gated, "SLOTS": k, "STAGES": shape.num_stages}
    expert_rows_kernel[grid](out, x_desc, w_desc, ids_TS, T, N, K, E, **flags, **blocks, **options)


def power_of_2(n: int) -> int:
    """Round up, to at least one number for each thread."""
    return max(1 << (n - 1).bit_length(), 128)


@gluon_jit(varying=("T",))
def expert_rows_kernel(
    out_ptr,  # gated: [experts hit, T, N]; else [SLOTS, T, N]
    x_desc,  # gated: [T, K], else [experts hit x T, K]; in tiles [BLOCK_M, BLOCK_K]
    w_desc,  # [E N, K], gated [E 2N, K], in tiles [BLOCK_N, BLOCK_K]
    ids_ptr,  # [T, SLOTS]
    T,
    N,
    K,
    E,
    IS_GATED: gl.constexpr,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_E: gl.constexpr,
    BLOCK_P: gl.constexpr,
):
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    if IS_GATED:
        tl.extra.cuda.gdc_wait()  # the second product's ids were there before the first began
    ranks, num_hit = _rank_experts(ids_ptr, T * SLOTS, E, BLOCK_E, BLOCK_P)
    w_ring = make_ring(w_desc, STAGES)
    x_ring = make_ring(x_desc, STAGES)
    up_ring = make_ring(w_desc, STAGES) if IS_GATED else w_ring
    ready, empty = make_barriers(STAGES, 1)
    hopper.fence_async_shared()
    n_tiles = gl.cdiv(N, BLOCK_N)
    num_own = gl.cdiv(gl.maximum(num_hit * n_tiles - gl.program_id(0), 0), gl.num_programs(0))
    ring = (w_ring, up_ring, x_ring, ready, empty)
    where = (ranks, num_own, n_tiles)
    gl.warp_specialize(
        [
            (_multiply, ((out_ptr, ids_ptr), ring, where, (T, N, K), IS_GATED, SLOTS)),
            (_copy, (x_desc, w_desc, ring, where, (T, N, K), IS_GATED)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[40],
    )


@gluon_jit
def _rank_experts(ids_ptr, P, E, BLOCK_E: gl.constexpr, BLOCK_P: gl.constexpr):
    """Number the experts that have a pair from 1 on, 0 the others; return this and their number."""
    OF_E: gl.constexpr = gl.BlockedLayout([BLOCK_E // 128], [32], [4], [0])
    OF_P: gl.constexpr = gl.BlockedLayout([BLOCK_P // 128], [32], [4], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p = gl.arange(0, BLOCK_P, OF_P)
    ids = gl.load(ids_ptr + p, mask=p < P, other=E, cache_modifier=".cg")
    e = gl.arange(0, BLOCK_E, OF_E)
    is_hit = ((gl.histogram(ids, BLOCK_E, layout=OF_E) > 0) & (e < E)).to(gl.int32)
    ranks = gl.associative_scan(is_hit, 0, _plus) * is_hit
    num_hit = gl.sum(is_hit, axis=0)
    return gl.allocate_shared_memory(gl.int32, [BLOCK_E], SHARED, ranks), num_hit


@gluon_jit
def _plus(a, b):
    return a + b


@gluon_jit
def _place(i, ranks, n_tiles, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """Find the expert, its number among those hit, and the first column of the i-th own tile."""
    BLOCK_E: gl.constexpr = ranks.shape[0]
    # all numbers in each warp, which finds the expert by itself
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_E // 32], [32], [WARPS], [0])
    tile = gl.program_id(0) + i * gl.num_programs(0)
    j = tile // n_tiles
    is_it = ranks.load(LAYOUT) == j + 1
    expert = gl.max(gl.where(is_it, gl.arange(0, BLOCK_E, LAYOUT), 0), axis=0)
    return expert, j, tile % n_tiles * BLOCK_N


@gluon_jit
def _copy(x_desc, w_desc, ring, where, sizes, IS_GATED: gl.constexpr):
    """Fill the ring, in one warp, weights first."""
    w_ring, _up_ring, _x_ring, _ready, empty = ring
    ranks, num_own, n_tiles = where
    T, N, K = sizes
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    blocks = gl.cdiv(K, BLOCK_K)
    ahead = gl.where(num_own > 0, gl.minimum(blocks, STAGES), 0)
    expert, _j, n0 = _place(0, ranks, n_tiles, BLOCK_N, 1)
    for i in range(ahead):
        _copy_w(w_desc, ring, expert * HALVES * N + n0, N, i * BLOCK_K, i, True, IS_GATED)
    tl.extra.cuda.gdc_wait()
    step = 0
    for tile in range(num_own):
        expert, j, n0 = _place(tile, ranks, n_tiles, BLOCK_N, 1)
        m0 = 0 if IS_GATED else j * T
        for i in range(blocks):
            at = step % STAGES
            hopper.mbarrier.wait(empty.index(at), (step // STAGES + 1) & 1)
            row = expert * HALVES * N + n0
            _copy_w(w_desc, ring, row, N, i * BLOCK_K, at, step >= ahead, IS_GATED)
            _copy_x(x_desc, ring, m0, i * BLOCK_K, at)
            step += 1
    tl.extra.cuda.gdc_launch_dependents()


@gluon_jit
def _copy_w(w_desc, ring, row, N, k, at, is_new, IS_GATED: gl.constexpr):
    """Copy a stage's tiles of W, if they are new; its barrier expects them and that of x."""
    w_ring, up_ring, x_ring, ready, _empty = ring
    ROWS: gl.constexpr = w_ring.shape[1] * (2 if IS_GATED else 1) + x_ring.shape[1]
    bar = ready.index(at)
    hopper.mbarrier.expect(bar, ROWS * w_ring.shape[2] * 2, pred=is_new)
    hopper.tma.async_copy_global_to_shared(w_desc, [row, k], bar, w_ring.index(at), pred=is_new)
    if IS_GATED:
        to = up_ring.index(at)
        hopper.tma.async_copy_global_to_shared(w_desc, [row + N, k], bar, to, pred=is_new)


@gluon_jit
def _copy_x(x_desc, ring, m0, k, at):
    hopper.tma.async_copy_global_to_shared(x_desc, [m0, k], ring[3].index(at), ring[2].index(at))


@gluon_jit
def _multiply(pointers, ring, where, sizes, IS_GATED: gl.constexpr, SLOTS: gl.constexpr):
    """Sum the tiles, in four warps, and write them. They have x, so all before it has ended."""
    w_ring, up_ring, x_ring, ready, empty = ring
    ranks, num_own, n_tiles = where
    K = sizes[2]
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    blocks = gl.cdiv(K, w_ring.shape[2])
    step = 0
    for tile in range(num_own):
        expert, j, n0 = _place(tile, ranks, n_tiles, BLOCK_N, 4)
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
        up = acc
        for i in range(blocks):
            at = step % STAGES
            hopper.mbarrier.wait(ready.index(at), (step // STAGES) & 1)
            x = x_ring.index(at).permute((1, 0))
            acc = hopper.warpgroup_mma(w_ring.index(at), x, acc, use_acc=i > 0, is_async=True)
            if IS_GATED:
                up = hopper.warpgroup_mma(up_ring.index(at), x, up, use_acc=i > 0, is_async=True)
                acc, up = hopper.warpgroup_mma_wait(2, [acc, up])
            else:
                acc = hopper.warpgroup_mma_wait(1, [acc])
            hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i > 0)
            step += 1
        if IS_GATED:
            acc, up = hopper.warpgroup_mma_wait(0, [acc, up])
            acc = gated(acc, up)
        else:
            acc = hopper.warpgroup_mma_wait(0, [acc])
        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        _store(pointers, acc, expert, j, n0, sizes, IS_GATED, SLOTS)


@gluon_jit
def _store(pointers, acc, expert, j, n0, sizes, IS_GATED: gl.constexpr, SLOTS: gl.constexpr):
    """Round once, and store by expert and row, or by slot and row where a row has the expert."""
    out_ptr, ids_ptr = pointers
    T, N, _K = sizes
    BLOCK_N: gl.constexpr = acc.shape[0]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    OUT: gl.constexpr = rows_together(BLOCK_N, dtype.primitive_bitwidth)
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    t = gl.arange(0, acc.shape[1], gl.SliceLayout(0, OUT))
    is_own = t < T
    row = j * T + t
    if not IS_GATED:
        slot = gl.full([acc.shape[1]], -1, gl.int32, gl.SliceLayout(0, OUT))
        for s in gl.static_range(SLOTS):
            ids = gl.load(ids_ptr + t * SLOTS + s, mask=t < T, other=-1, cache_modifier=".cg")
            slot = gl.where(ids == expert, s, slot)
        is_own = is_own & (slot >= 0)
        row = slot * T + t
    out = out_ptr + row.to(gl.int64)[None, :] * N + n[:, None]
    y = gl.convert_layout(acc.to(dtype), OUT)
    inside = (n < N)[:, None] & is_own[None, :]
    gl.store(out, y, mask=inside, eviction_policy="evict_last")  # as store_kept of kept.py
