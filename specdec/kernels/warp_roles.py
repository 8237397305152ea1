"""What warps with roles share: rings of tiles that a warp fills, and tiles in registers.

One warp lets the copy engine fill a ring of tiles of keys and values, and two groups of four warps
have 64 query rows each. Scores of a tile are multiplied while the values before it are, and one
group's powers are taken under the other's products. prompt/attention.py and attention/wide_walk.py
are made of these.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from specdec.kernels import GluonDescriptor, constexpr_function, gl, gluon_jit, hopper
from specdec.kernels.attention.splits import add_part, finite, weigh

ROWS = 128  # of a query tile, half for each group of warps


class _Memory(NamedTuple):
    """Where a descriptor's numbers are. It keeps no tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


# each layer's keys and values, and what a few passes have as queries and as partial results
@lru_cache(maxsize=4096)
def descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, ...]
) -> GluonDescriptor:
    """Describe contiguous numbers for the copy engine."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    bits = 8 * dtype.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(shape))
    return GluonDescriptor(_Memory(address, dtype), list(shape), strides, list(block), layout)


@gluon_jit
def make_ring(desc, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  # no starred lists here
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon_jit
def make_barriers(COUNT: gl.constexpr, READERS: gl.constexpr = 2):
    """Make two barriers for each place of a ring: it is ready; READERS have left it empty again."""
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=READERS)
    return ready, empty


@gluon_jit
def make_turns():
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        hopper.mbarrier.init(turns.index(i), count=1)
    return turns


@gluon_jit
def make_ones(dtype: gl.constexpr, ONES: gl.constexpr, S: gl.constexpr):
    """Make a matrix [ONES, S] in shared memory."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(
        dtype, [ONES, S], SHARED, gl.full([ONES, S], 1.0, dtype, BLOCKED)
    )


@gluon_jit
def _place(step, COUNT: gl.constexpr):
    """Find a step's place in a ring of a power of 2; a remainder of signed numbers takes longer."""
    return step & (COUNT - 1)


@gluon_jit
def _phase(step, COUNT: gl.constexpr):
    """Whether a ring has been gone through an odd number of times."""
    SHIFT: gl.constexpr = _log2(COUNT)
    return (step >> SHIFT) & 1


@constexpr_function
def _log2(count):
    assert count & (count - 1) == 0, count
    return count.bit_length() - 1


@gluon_jit
def fill(desc, coordinates, ring, bars, step):
    """Let the copy engine fill the next place, once it is empty."""
    ready, empty = bars
    COUNT: gl.constexpr = ring.shape[0]
    at = _place(step, COUNT)
    hopper.mbarrier.wait(empty.index(at), _phase(step, COUNT) ^ 1)
    hopper.mbarrier.expect(ready.index(at), desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(desc, coordinates, ready.index(at), ring.index(at))


@gluon_jit
def filled(ring, bars, step, is_there):
    """Wait for the next place to be filled, and return it."""
    COUNT: gl.constexpr = ring.shape[0]
    at = _place(step, COUNT)
    hopper.mbarrier.wait(bars[0].index(at), _phase(step, COUNT), pred=is_there)
    return ring.index(at)


@gluon_jit
def release(ring, bars, step, was_there=True):
    COUNT: gl.constexpr = ring.shape[0]
    hopper.mbarrier.arrive(bars[1].index(_place(step, COUNT)), pred=was_there)


@gluon_jit
def _await_turn(turns, step, HALF: gl.constexpr):
    """Let the two groups of warps begin products in turn, so that one takes powers meanwhile.

    Steps begin at 0, or at -1 after an arrival at each of the turns.
    """
    hopper.mbarrier.wait(turns.index(HALF), (step + 1 - HALF) & 1)


@gluon_jit
def _pass_turn(turns, HALF: gl.constexpr):
    hopper.mbarrier.arrive(turns.index(1 - HALF))


@constexpr_function
def tile_layout(COLUMNS):
    """Lay out a tile of 64 rows in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon_jit
def no_keys_beside(ROWS: gl.constexpr, BESIDE: gl.constexpr, C: gl.constexpr):
    """The partial result of rows that have seen no key; peaks lie as beside a tile BESIDE wide."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, tile_layout(BESIDE))
    peak = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    total = gl.zeros([ROWS], gl.float32, LAYOUT)
    return peak, total, _zeros(ROWS, C)


@gluon_jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    LAYOUT: gl.constexpr = tile_layout(COLUMNS)
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon_jit
def _begin_scores(q, k_ring, step):
    COUNT: gl.constexpr = k_ring.shape[0]
    k = k_ring.index(_place(step, COUNT))
    zeros = _zeros(q.shape[0], k.shape[0])
    return hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _begin_values(weights, v, ones, acc, is_later):
    """Begin to add the weighted values, and to sum up the weights."""
    zeros = _zeros(acc.shape[0], ones.shape[0])
    acc = hopper.warpgroup_mma(weights, v, acc, use_acc=is_later, is_async=True)
    summed = hopper.warpgroup_mma(
        weights, ones.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    return acc, summed


@gluon_jit
def first_scores(q, rings, bars, step):
    """Multiply the scores of the tile at `step`, with no values to be added meanwhile."""
    k_ring = rings[1]
    filled(k_ring, bars[1], step, True)
    scores = hopper.warpgroup_mma_wait(0, [_begin_scores(q, k_ring, step)])
    release(k_ring, bars[1], step)
    return scores


@gluon_jit
def next_scores(q, rings, bars, step, weights, acc, is_later, HALF: gl.constexpr, is_there=True):
    """Multiply the scores of the tile after `step`, while that tile's weighted values are added.

    acc, and the weights' sums, are to be waited for: `added`. is_there: whether there is a tile at
    `step`; if not, acc holds anything afterwards
    """
    _q_ring, k_ring, v_ring, ones = rings
    left = _left_side(weights, v_ring)
    _await_turn(bars[3], step, HALF)
    scores = _begin_scores(q, k_ring, step + 1)
    v = filled(v_ring, bars[2], step, is_there)
    acc, summed = _begin_values(left, v, ones, acc, is_later)
    _pass_turn(bars[3], HALF)
    scores = hopper.warpgroup_mma_wait(2, [scores])
    release(k_ring, bars[1], step + 1)
    return scores, acc, summed


@gluon_jit
def added(rings, bars, step, acc, summed, weights, total, decay, is_there=True):
    """Wait for values and total of the tile at `step`. weights: of the next, known by then."""
    acc, summed, weights = hopper.warpgroup_mma_wait(0, [acc, summed, weights])
    release(rings[2], bars[2], step, is_there)
    return acc, weights, _add_total(total, decay, summed)


@gluon_jit
def with_last(v, rings, bars, step, weights, acc, total, decay, is_later, HALF: gl.constexpr):
    """Add the values and total of the last tile."""
    _q_ring, _k_ring, v_ring, ones = rings
    left = _left_side(weights, v_ring)
    _await_turn(bars[3], step, HALF)
    acc, summed = _begin_values(left, v, ones, acc, is_later)
    _pass_turn(bars[3], HALF)
    acc, summed = hopper.warpgroup_mma_wait(0, [acc, summed])
    release(v_ring, bars[2], step)
    return acc, _add_total(total, decay, summed)


@gluon_jit
def weights_of(scores, position, start, scale, peak, IS_MASKED: gl.constexpr, window=None):
    """Compute a tile's powers of 2, what the sums so far decay by, and the peak.

    window: of the keys up to each position that a row sees; None: all of them
    """
    if IS_MASKED:
        s = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        is_seen = s[None, :] <= position[:, None]
        if window is not None:
            is_seen = is_seen & (s[None, :] > position[:, None] - window)
        scores = gl.where(is_seen, scores, float("-inf"))
    highest = gl.convert_layout(_highest(scores), peak.type.layout)
    decay, _, peak = weigh(peak, highest * scale)
    return gl.exp2(gl.fma(scores, scale, -finite(peak)[:, None])), decay, peak


@gluon_jit
def _highest(scores):
    """Take the maximum of each row by halves, and so on, lest each number waits for the last."""
    halved = scores
    for _i in gl.static_range(3):
        halves = halved.reshape([halved.shape[0], 2, halved.shape[1] // 2]).permute((0, 2, 1))
        left, right = gl.split(halves)
        halved = gl.maximum(left, right)
    return gl.max(halved, axis=1)


@gluon_jit
def _left_side(weights, v):
    """Round the weights, as the left side of a product."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, tile_layout(v.shape[2]), 2)
    return gl.convert_layout(weights, LEFT).to(v.dtype)


@gluon_jit
def _add_total(total, decay, summed):
    summed = gl.convert_layout(gl.max(summed, axis=1), total.type.layout)
    return gl.fma(total, decay, summed)


@gluon_jit
def finished_split(whole, peak, total, acc):
    """The partial result of earlier splits, and that of the split that ends here."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    peak = gl.convert_layout(peak, ROWS)
    return add_part(whole[0], whole[1], whole[2], peak, gl.convert_layout(total, ROWS), acc)


@gluon_jit
def column_beside(x, tile):
    """Lay x [rows] beside a tile of another layout."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout))[:, None]
