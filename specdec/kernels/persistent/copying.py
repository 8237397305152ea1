"""What one warp does: fill the ring with the tiles of its program's items, as stages become empty.

`multiply` of kernel.py takes them in this order.
"""

from specdec.kernels import gl, gluon_jit, hopper, tl
from specdec.kernels.persistent.items import (
    extent_of,
    num_own,
    own_item,
    place_of_item,
    place_of_part,
)
from specdec.kernels.sum_order import split_blocks


@gluon_jit
def copy_tiles(sources, ring, sizes, VARIANT: gl.constexpr):
    workload = extent_of(ring, sizes, VARIANT)
    step = 0
    K = sizes.K
    blocks = split_blocks(K, ring.x.shape[2], VARIANT.splits) * VARIANT.walked
    ahead = _copy_ahead(sources, ring, workload, blocks, VARIANT)
    wait_for_inputs()
    for i in range(num_own(workload)):
        place = place_of_item(own_item(i), ring, workload, VARIANT)
        step = _copy_blocks(sources, ring, place, blocks, step, ahead, VARIANT, False)
    if VARIANT.cuts > 1:
        for i in range(gl.program_id(0), workload.num_cut, gl.num_programs(0)):
            place = place_of_part(i, ring, workload, VARIANT)
            step = _copy_blocks(sources, ring, place, blocks, step, ahead, VARIANT, True)


@gluon_jit
def wait_for_inputs():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()  # all programs run, so an early one displaces none


@gluon_jit
def _copy_ahead(sources, ring, workload, blocks, VARIANT: gl.constexpr):
    """Load W of the first blocks, which no launch writes; returns how many."""
    BLOCK_K: gl.constexpr = ring.x.shape[2]
    count = gl.where(num_own(workload) > 0, blocks, 0)
    count = gl.minimum(count, VARIANT.num_stages)
    part, n0, _m0 = place_of_item(own_item(0), ring, workload, VARIANT)
    for i in range(count):
        _load_w(sources, ring, n0, (part * blocks + i) * BLOCK_K, i, True, VARIANT, False)
    return count


@gluon_jit
def _copy_blocks(
    sources, ring, place, blocks, step, ahead, VARIANT: gl.constexpr, IS_CUT: gl.constexpr
):
    """Copy the tiles of one item, in all blocks of its K; returns the next step.

    Those of W are there or on their way for as many steps as were loaded `ahead`.
    """
    part, n0, m0 = place
    STAGES: gl.constexpr = VARIANT.num_stages
    BLOCK_K: gl.constexpr = ring.x.shape[2]
    BLOCK_M: gl.constexpr = ring.x.shape[1] // (VARIANT.cuts if IS_CUT else 1)
    for i in range(blocks):
        k = (part * blocks + i) * BLOCK_K
        at = step % STAGES
        ready = ring.ready.index(at)
        hopper.mbarrier.wait(ring.empty.index(at), (step // STAGES + 1) & 1)
        _load_w(sources, ring, n0, k, at, step >= ahead, VARIANT, IS_CUT)
        if IS_CUT:
            _load(sources.rest, m0, k, ready, ring.x.index(at).slice(0, BLOCK_M))
        else:
            _load(sources.x, m0, k, ready, ring.x.index(at))
        if VARIANT.tail > 0:
            _load(sources.rest, m0 + BLOCK_M, k, ready, ring.tail.index(at))
        if VARIANT.form == "block":
            _load(sources.x_scales, k // ring.x.shape[2], m0, ready, ring.x_scales.index(at))
        step += 1
    return step


@gluon_jit
def _load_w(sources, ring, row, k, at, is_new, VARIANT: gl.constexpr, IS_CUT: gl.constexpr):
    """Load a stage's tiles of W, if they are new; its barrier expects them and those of x."""
    GROUPS: gl.constexpr = VARIANT.groups
    BLOCK_M: gl.constexpr = ring.x.shape[1] // (VARIANT.cuts if IS_CUT else 1)
    ROWS: gl.constexpr = (2 if VARIANT.is_gated else 1) * GROUPS * 64 + BLOCK_M + VARIANT.tail
    ROW_BYTES: gl.constexpr = ring.x.shape[2] * ring.x.dtype.primitive_bitwidth // 8
    ready = ring.ready.index(at)
    hopper.mbarrier.expect(ready, ROWS * ROW_BYTES + 4 * VARIANT.num_scales, pred=is_new)
    TILES: gl.constexpr = 1 if GROUPS == 2 else GROUPS
    for i in gl.static_range(TILES):
        to = ring.w.index(at * TILES + i)
        if VARIANT.has_turns:
            turn = row // 8 + i * 4
            hopper.tma.async_copy_global_to_shared(
                sources.w, [turn, 0, 0, k], ready, to, pred=is_new
            )
        else:
            _load(sources.w, row + i * 64, k, ready, to, is_new)
    if VARIANT.is_gated:
        _load(sources.up, row, k, ready, ring.up.index(at), is_new)
    if VARIANT.form == "block":
        g = k // ring.x.shape[2]
        _load(sources.w_scales, g, row, ready, ring.w_scales.index(at), is_new)
        if VARIANT.is_gated:
            _load(sources.up_scales, g, row, ready, ring.up_scales.index(at), is_new)


@gluon_jit
def _load(desc, row, k, ready, to, is_new=True):
    hopper.tma.async_copy_global_to_shared(desc, [row, k], ready, to, pred=is_new)
