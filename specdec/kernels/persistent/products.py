"""The sums of an item, by the tensor cores: two blocks of K are in flight at a time.

Sums are a tuple of tiles in the registers of four warps: of 64 rows of W, of as many up rows if it
is gated, and both again of the tail if x has one.
"""

from specdec.kernels import gl, gluon_jit, hopper
from specdec.kernels.persistent.blocks import rows_of_group, zeros
from specdec.kernels.persistent.fp8 import fp8_split_sums
from specdec.kernels.sum_order import add_now, split_blocks


@gluon_jit
def sums_of_item(
    ring, step, sizes, place, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Make all sums of an item; returns them and the next step."""
    return _sums_of(ring, step, sizes, place, VARIANT, GROUP, IS_CUT, VARIANT.walked)


@gluon_jit
def _sums_of(
    ring,
    step,
    sizes,
    place,
    VARIANT: gl.constexpr,
    GROUP: gl.constexpr,
    IS_CUT: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Sum the next splits as sum_order.py does."""
    if COUNT == 1:
        if VARIANT.form == "plain":
            return _split_sums(ring, step, sizes.K, VARIANT, GROUP, IS_CUT)
        else:
            return fp8_split_sums(ring, step, sizes, place, VARIANT, GROUP, IS_CUT)
    else:
        HALF: gl.constexpr = (COUNT + 1) // 2
        low, step = _sums_of(ring, step, sizes, place, VARIANT, GROUP, IS_CUT, HALF)
        REST: gl.constexpr = COUNT - HALF
        high, step = _sums_of(ring, step, sizes, place, VARIANT, GROUP, IS_CUT, REST)
        return _plus(low, high), step


@gluon_jit
def _split_sums(ring, step, K, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr):
    blocks = split_blocks(K, ring.x.shape[2], VARIANT.splits)
    sums = zeros(ring, VARIANT, IS_CUT)
    return add_blocks(ring, step, sums, blocks, VARIANT, GROUP, IS_CUT, False)


@gluon_jit
def _plus(sums, more):
    COUNT: gl.constexpr = len(sums)
    if COUNT == 1:
        return (add_now(sums[0], more[0]),)
    else:
        return add_now(sums[0], more[0]), add_now(sums[1], more[1])


@gluon_jit
def add_blocks(
    ring,
    step,
    sums,
    blocks,
    VARIANT: gl.constexpr,
    GROUP: gl.constexpr,
    IS_CUT: gl.constexpr,
    GOES_ON: gl.constexpr,
):
    """Add some blocks of K, to none unless it GOES_ON; returns the sums and the next step.

    A stage is given back when the block after it has begun. GOES_ON: a block before is in flight.
    """
    STAGES: gl.constexpr = VARIANT.num_stages
    for i in range(blocks):
        hopper.mbarrier.wait(ring.ready.index(step % STAGES), (step // STAGES) & 1)
        is_later = True if GOES_ON else i > 0
        sums = begin(ring, step % STAGES, sums, is_later, VARIANT, GROUP, IS_CUT)
        sums = wait(sums, 1)
        hopper.mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), pred=is_later)
        step += 1
    sums = wait(sums, 0)
    hopper.mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES))
    return sums, step


@gluon_jit
def begin(
    ring, at, sums, is_later, VARIANT: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr
):
    """Begin to add the products of one stage."""
    w = rows_of_group(ring, at, VARIANT, GROUP)
    x = ring.x.index(at)
    if IS_CUT:
        x = x.slice(0, ring.x.shape[1] // VARIANT.cuts)
    first = _product(w, x, sums[0], is_later)
    if VARIANT.is_gated:
        up = ring.up.index(at).slice(GROUP * 64, 64)
        second = _product(up, x, sums[1], is_later)
        if VARIANT.tail > 0:
            tail = ring.tail.index(at)
            third = _product(w, tail, sums[2], is_later)
            return first, second, third, _product(up, tail, sums[3], is_later)
        else:
            return first, second
    elif VARIANT.tail > 0:
        return first, _product(w, ring.tail.index(at), sums[1], is_later)
    else:
        return (first,)


@gluon_jit
def _product(w, x, sums, is_later):
    return hopper.warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=is_later, is_async=True)


@gluon_jit
def wait(sums, BLOCKS: gl.constexpr):
    """Wait until no more than this many blocks are in flight."""
    COUNT: gl.constexpr = len(sums)
    if COUNT == 1:
        return (hopper.warpgroup_mma_wait(BLOCKS, sums),)
    else:
        return hopper.warpgroup_mma_wait(BLOCKS * COUNT, sums)
