"""The kernel: the shared memory of a program, and which warps have which role."""

from specdec.kernels import gl, gluon_jit, hopper
from specdec.kernels.persistent.copying import copy_tiles, wait_for_inputs
from specdec.kernels.persistent.multiplying import multiply
from specdec.kernels.persistent.variant import Results, Ring, Sizes, Sources


@gluon_jit(varying=("T",))
def persistent_kernel(
    out_desc,  # [S, T, N] in blocks [1, rows, a group's columns]
    w_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K], or a group's rows at a time
    up_desc,  # the same
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    rest_desc,  # [T, K] in tiles of a tail, or of cut tiles
    bias_ptr,  # [N], or [2N] if gated
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
    w_ring = _ring(w_desc, STAGES if VARIANT.groups == 2 else STAGES * VARIANT.groups)
    x_ring = _ring(x_desc, STAGES)
    up_ring = _ring(up_desc, STAGES) if VARIANT.is_gated else w_ring
    tail_ring = _ring(rest_desc, STAGES) if VARIANT.tail > 0 else x_ring
    out_buffers = _ring(out_desc, 2 * VARIANT.groups)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=VARIANT.groups)
    hopper.fence_async_shared()
    sources = Sources(w=w_desc, up=up_desc, x=x_desc, rest=rest_desc)
    ring = Ring(w=w_ring, up=up_ring, x=x_ring, tail=tail_ring, ready=ready, empty=empty)
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
def _ring(desc, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  # no starred lists here
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
