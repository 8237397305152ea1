"""x W^T for many rows on a Hopper GPU: one program a multiprocessor, its warps with roles.

One warp lets the copy engine fill a ring of tiles of W and x. Two or three groups of four warps
multiply: 64 rows of the tile of W each, all of its rows of x, with the products in flight while the
next tiles arrive. Results leave through shared memory, in whole lines, while the next tile is
multiplied; those of 16 bits are held in registers and leave piece by piece then. Of gate and up
rows with tiles of x of 256 rows 8 and 8 take turns, so that one product has both. W is no launch's
result, so its first tiles are read before the launch before this one has ended.

A sum has the order that linear.py describes, and its bits: W is on the wide side, a split adds 16
of K after another, and a program that walks all splits adds them in order.

Tiles seldom divide by the multiprocessors, and those of a last turn would leave many idle. Either
their rows are cut, so that more programs have some; or programs relay: the last two turns are cut
along K into equal shares, and a program leaves its unfinished sums to the next one, which goes on
where they end. It begins with what it leaves and ends with what it takes over, so it seldom waits.
Programs for the same rows of W relay together: W is read from memory once.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import (
    GluonDescriptor,
    barrier,
    constexpr_function,
    gl,
    gluon_jit,
    hopper,
    num_multiprocessors,
    tl,
)
from specdec.kernels.needed import need
from specdec.kernels.tile_order import place_of, split_blocks
from specdec.kernels.tile_shapes import RELAY, TURNS, row_pieces
from specdec.kernels.tiles import Tiles, rows_to_read

BLOCK_N = 128  # rows of W in a tile of two groups
BLOCK_K = 64
OUT_ROWS = 32  # of a tile of results, in a buffer
LEFT_SUMS = BLOCK_N // 2 * 512  # of a group of warps, at most


class Form(NamedTuple):
    """What a compiled kernel is for."""

    splits: int
    walked: int  # splits that a program adds; the others are its neighbours'
    is_gated: bool
    has_bias: bool
    tail: int  # rows of x in a second tile beside the first
    cuts: int  # parts of a tile's rows in the last turn
    is_relay: bool
    num_left: int  # sums of a group of warps that fit into its place
    num_stages: int
    height: int  # columns of the results that a tile makes
    groups: int  # of four warps, with 64 rows of W each
    copy_registers: int
    is_late: bool  # 16-bit results leave while the next tile is multiplied
    has_turns: bool  # 8 gate and 8 up rows of W in turn: one product for both; is_gated is false


def launch_persistent(
    out_STN: Tensor,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    """Write the splits' sums, or with S = 1 their total. is_gated: gate rows of W before up rows.

    N must be a multiple of 8, the halves' too. A bias needs S = 1. No launch since the last
    synchronisation may write the weight.
    """
    S, T, N = out_STN.shape
    block_m, tail = row_pieces(tiles.block_m)
    has_turns = is_gated and tiles.block_m == TURNS
    groups = tiles.block_n // 64
    height = tiles.block_n // 2 if has_turns else tiles.block_n
    is_relay = tiles.cuts == RELAY
    cuts = 1 if is_relay else tiles.cuts
    w_desc, up_desc = _describe_weight(weight_NK, N, tiles, has_turns)
    _persistent_kernel[(_num_programs(out_STN, tiles, height),)](
        _describe_out(out_STN, height // groups, groups),
        w_desc,
        up_desc,
        _describe_rows(x_TK, block_m),
        _describe_rows(x_TK, tail or block_m // cuts),
        weight_NK if bias_N is None else bias_N,
        *(_relay_room(x_TK.device) if is_relay else (weight_NK, weight_NK)),
        T,
        N,
        x_TK.shape[1],
        FORM=Form(
            splits=tiles.splits,
            walked=tiles.splits // S,
            is_gated=is_gated and not has_turns,
            has_bias=bias_N is not None,
            tail=tail,
            cuts=cuts,
            is_relay=is_relay,
            num_left=LEFT_SUMS,
            num_stages=tiles.num_stages,
            height=height,
            groups=groups,
            copy_registers=40 if groups == 2 else 24,  # what the groups leave
            is_late=_may_leave_late(out_STN, x_TK.shape[1], tiles),
            has_turns=has_turns,
        ),
        num_warps=4,
        launch_pdl=True,
        **need(),
    )


def _num_programs(out_STN: Tensor, tiles: Tiles, height: int) -> int:
    S, T, N = out_STN.shape
    m_tiles = -(-T // tiles.block_m)
    at_once = num_multiprocessors(out_STN.device)
    if tiles.cuts == RELAY:
        at_once -= at_once % m_tiles
    return min(S * -(-N // height) * m_tiles, at_once)


def _may_leave_late(out_STN: Tensor, K: int, tiles: Tiles) -> bool:
    """Whether a tile's results can wait for the next tile: in 16 bits, beside one sum."""
    S = len(out_STN)
    block_m, tail = row_pieces(tiles.block_m)
    num_blocks = K // tiles.splits // BLOCK_K
    is_alone = tail == 0 and tiles.splits == S
    return is_alone and out_STN.element_size() == 2 and num_blocks >= block_m // OUT_ROWS


def _describe_weight(
    weight_NK: Tensor, N: int, tiles: Tiles, has_turns: bool
) -> tuple[GluonDescriptor, GluonDescriptor]:
    """The gate rows and the up rows, or all rows twice."""
    if has_turns:
        desc = _describe_turns(weight_NK)
        return desc, desc
    rows = tiles.block_n if tiles.block_n == BLOCK_N else 64  # no power of two: a group's
    return _describe(weight_NK[:N], rows), _describe(weight_NK[-N:], rows)


@cache
def _relay_room(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums that each group of warps leaves to the next program, and flags that are 1 meanwhile.

    One product at a time uses them: those of a device run on one stream. They are made at the
    first launch, which comes before any capture: graphs hold their addresses.
    """
    assert not torch.cuda.is_current_stream_capturing(), "a relay's first launch is in a capture"
    groups = 2 * num_multiprocessors(device)
    room = torch.empty(groups, LEFT_SUMS, dtype=torch.float32, device=device)
    return room, torch.zeros(groups, dtype=torch.int32, device=device)


def _describe(matrix: Tensor, rows: int) -> GluonDescriptor:
    shape, strides = list(matrix.shape), list(matrix.stride())
    return GluonDescriptor(matrix, shape, strides, [rows, BLOCK_K], _shared_layout(matrix))


def _describe_turns(weight_NK: Tensor) -> GluonDescriptor:
    """[2N, K] as [N / 8, 2, 8, K]: a block has 8 gate rows, the up rows beside them, 8 more."""
    N, K = len(weight_NK) // 2, weight_NK.shape[1]
    row = weight_NK.stride(0)
    shape, strides = [N // 8, 2, 8, K], [8 * row, N * row, row, 1]
    block = [BLOCK_N // 16, 2, 8, BLOCK_K]
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * weight_NK.element_size(), rank=4
    )
    return GluonDescriptor(weight_NK, shape, strides, block, layout)


def _describe_rows(x_TK: Tensor, rows: int) -> GluonDescriptor:
    desc = _describe(x_TK, rows)
    desc.shape[0] = rows_to_read(x_TK)
    return desc


def _describe_out(out_STN: Tensor, columns: int, groups: int) -> GluonDescriptor:
    """In blocks that two of each group fit into what the ring leaves."""
    rows = OUT_ROWS if groups == 2 else OUT_ROWS * 2 // out_STN.element_size()
    shape, strides = list(out_STN.shape), list(out_STN.stride())
    layout = _shared_layout(out_STN, min(128, columns * out_STN.element_size()))
    return GluonDescriptor(out_STN, shape, strides, [1, rows, columns], layout)


def _shared_layout(tensor: Tensor, swizzled: int = 128) -> object:
    bits = 8 * tensor.element_size()
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzled, element_bitwidth=bits, rank=tensor.ndim
    )


@gluon_jit(varying=("T",))
def _persistent_kernel(
    out_desc,  # [S, T, N] in blocks [1, OUT_ROWS, BLOCK_N / 2]
    w_desc,  # [N, K] in tiles [BLOCK_N, BLOCK_K]
    up_desc,  # the same
    x_desc,  # [T, K] in tiles [BLOCK_M, BLOCK_K]
    rest_desc,  # [T, K] in tiles of a tail, or of cut tiles
    bias_ptr,  # [N], or [2N] if gated
    room_ptr,  # [2 programs, LEFT_SUMS] float32
    flags_ptr,  # [2 programs] int32
    T,
    N,
    K,
    FORM: gl.constexpr,
    needed_ptr=None,  # [1]; see needed.py
):
    if needed_ptr is not None:
        _wait_for_inputs()
        if gl.load(needed_ptr) == 0:
            return
    STAGES: gl.constexpr = FORM.num_stages
    w_ring = _ring(w_desc, STAGES if FORM.groups == 2 else STAGES * FORM.groups)
    x_ring = _ring(x_desc, STAGES)
    up_ring = _ring(up_desc, STAGES) if FORM.is_gated else w_ring
    tail_ring = _ring(rest_desc, STAGES) if FORM.tail > 0 else x_ring
    out_buffers = _ring(out_desc, 2 * FORM.groups)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=FORM.groups)
    hopper.fence_async_shared()
    descs = (w_desc, up_desc, x_desc, rest_desc)
    ring = (w_ring, up_ring, x_ring, tail_ring, ready, empty)
    results = (out_desc, out_buffers, bias_ptr, room_ptr, flags_ptr)
    sizes = (T, N, K)
    if FORM.groups == 2:
        gl.warp_specialize(
            [
                (_multiply_upper, (results, ring, sizes, FORM)),
                (_multiply_lower, (results, ring, sizes, FORM)),
                (_copy, (descs, ring, sizes, FORM)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[232, FORM.copy_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_upper, (results, ring, sizes, FORM)),
                (_multiply_lower, (results, ring, sizes, FORM)),
                (_multiply_third, (results, ring, sizes, FORM)),
                (_copy, (descs, ring, sizes, FORM)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, FORM.copy_registers],
        )


@gluon_jit
def _wait_for_inputs():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()  # all programs run, so an early one displaces none


@gluon_jit
def _ring(desc, COUNT: gl.constexpr):
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005  # no starred lists here
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon_jit
def _extent(ring, sizes, FORM: gl.constexpr):
    """Tiles of W, tiles of x, and how many items of work are whole and cut.

    A relay runs in groups, a program for each tile of x, which read the same of W at a time; its
    items are those of a group.
    """
    T, N, _K = sizes
    n_tiles = gl.cdiv(N, FORM.height)
    m_tiles = gl.cdiv(T, ring[2].shape[1] + FORM.tail)
    items = n_tiles * (FORM.splits // FORM.walked)
    if FORM.is_relay:
        groups = gl.num_programs(0) // m_tiles
        num_whole = gl.maximum(items // groups - 1, 0) * groups
        return n_tiles, m_tiles, num_whole, items - num_whole
    else:
        items *= m_tiles
        num_whole = items if FORM.cuts == 1 else items - items % gl.num_programs(0)
        return n_tiles, m_tiles, num_whole, (items - num_whole) * FORM.cuts


@gluon_jit
def _share(extent, sizes, FORM: gl.constexpr, BLOCK_K: gl.constexpr):
    """A relay's share: its first item and the block to go on with, the last item and where to end.

    Of the items that are not in whole turns, in blocks of K. A share is an item at least.
    """
    _n_tiles, m_tiles, num_whole, num_shared = extent
    group = gl.program_id(0) // m_tiles
    groups = gl.num_programs(0) // m_tiles
    blocks = split_blocks(sizes[2], BLOCK_K, FORM.splits)
    first = group * num_shared * blocks // groups
    end = (group + 1) * num_shared * blocks // groups
    return num_whole + first // blocks, first % blocks, num_whole + end // blocks, end % blocks


@gluon_jit
def _num_own(extent, share, FORM: gl.constexpr):
    """How many items a program makes from beginning to end, without those of a cut last turn."""
    _n_tiles, m_tiles, num_whole, _num_cut = extent
    if FORM.is_relay:
        return num_whole // (gl.num_programs(0) // m_tiles) + share[2] - _first_own(share)
    else:
        return gl.cdiv(num_whole - gl.program_id(0), gl.num_programs(0))


@gluon_jit
def _own(i, extent, share, FORM: gl.constexpr):
    """Which item is the program's i-th."""
    _n_tiles, m_tiles, num_whole, _num_cut = extent
    if FORM.is_relay:
        groups = gl.num_programs(0) // m_tiles
        in_turn = gl.program_id(0) // m_tiles + i * groups
        turns = num_whole // groups
        return gl.where(i < turns, in_turn, _first_own(share) + i - turns)
    else:
        return gl.program_id(0) + i * gl.num_programs(0)


@gluon_jit
def _first_own(share):
    """The first item of a share that begins in it."""
    return share[0] + (share[1] > 0).to(gl.int32)


@gluon_jit
def _place(item, ring, extent, FORM: gl.constexpr, IS_CUT: gl.constexpr):
    """An item's split, and its first row of W and of x. Cut items are counted by themselves."""
    n_tiles, m_tiles, _num_whole, _num_cut = extent
    CUTS: gl.constexpr = FORM.cuts if IS_CUT else 1
    BLOCK_M: gl.constexpr = ring[2].shape[1]
    HEIGHT: gl.constexpr = FORM.height
    if FORM.is_relay:
        m0 = gl.program_id(0) % m_tiles * (BLOCK_M + FORM.tail)
        return item // n_tiles, item % n_tiles * HEIGHT, m0
    else:
        tile = item // CUTS
        n_tile, m_tile = place_of(tile % (n_tiles * m_tiles), n_tiles, m_tiles)
        m0 = m_tile * (BLOCK_M + FORM.tail) + item % CUTS * (BLOCK_M // CUTS)
        return tile // (n_tiles * m_tiles), n_tile * HEIGHT, m0


@gluon_jit
def _copy(descs, ring, sizes, FORM: gl.constexpr):
    """What one warp does: fill the ring, as places become empty."""
    extent = _extent(ring, sizes, FORM)
    step = 0
    BLOCK_K: gl.constexpr = ring[2].shape[2]
    blocks = split_blocks(sizes[2], BLOCK_K, FORM.splits)
    share = _share(extent, sizes, FORM, BLOCK_K)
    ahead = _copy_ahead(descs, ring, extent, share, blocks, FORM)
    _wait_for_inputs()
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share[3] > 0:
            place = _place(share[2], ring, extent, FORM, False)
            step = _copy_blocks(descs, ring, place, 0, share[3], step, ahead, sizes[2], FORM, False)
    for i in range(_num_own(extent, share, FORM)):
        item = _own(i, extent, share, FORM)
        place = _place(item, ring, extent, FORM, False)
        step = _copy_blocks(
            descs, ring, place, 0, blocks * FORM.walked, step, ahead, sizes[2], FORM, False
        )
    if FORM.cuts > 1:
        for item in range(gl.program_id(0), extent[3], gl.num_programs(0)):
            place = _place(extent[2] * FORM.cuts + item, ring, extent, FORM, True)
            step = _copy_blocks(
                descs, ring, place, 0, blocks * FORM.walked, step, ahead, sizes[2], FORM, True
            )
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share[1] > 0:
            place = _place(share[0], ring, extent, FORM, False)
            step = _copy_blocks(
                descs, ring, place, share[1], blocks, step, ahead, sizes[2], FORM, False
            )


@gluon_jit
def _copy_ahead(descs, ring, extent, share, blocks, FORM: gl.constexpr):
    """W of the first blocks, which no launch writes; returns how many."""
    BLOCK_K: gl.constexpr = ring[2].shape[2]
    count = gl.where(_num_own(extent, share, FORM) > 0, blocks * FORM.walked, 0)
    item = _own(0, extent, share, FORM)
    if FORM.is_relay:
        item = gl.where(share[3] > 0, share[2], item)
        count = gl.where(share[3] > 0, share[3], count)
    count = gl.minimum(count, FORM.num_stages)
    split, n0, _m0 = _place(item, ring, extent, FORM, False)
    for i in range(count):
        _load_w(descs, ring, n0, (split * blocks + i) * BLOCK_K, i, True, FORM, False)
    return count


@gluon_jit
def _copy_blocks(
    descs, ring, place, first, end, step, ahead, K, FORM: gl.constexpr, IS_CUT: gl.constexpr
):
    """The tiles of one item, or of some blocks of its K; returns the next step.

    Those of W are there or on their way for as many steps as were loaded `ahead`.
    """
    _w_desc, _up_desc, x_desc, rest_desc = descs
    _w_ring, _up_ring, x_ring, tail_ring, ready, empty = ring
    split, n0, m0 = place
    STAGES: gl.constexpr = FORM.num_stages
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_M: gl.constexpr = x_ring.shape[1] // (FORM.cuts if IS_CUT else 1)
    blocks = split_blocks(K, BLOCK_K, FORM.splits)
    for i in range(first, end):
        k = (split * blocks + i) * BLOCK_K
        at = step % STAGES
        bar = ready.index(at)
        hopper.mbarrier.wait(empty.index(at), (step // STAGES + 1) & 1)
        _load_w(descs, ring, n0, k, at, step >= ahead, FORM, IS_CUT)
        if IS_CUT:
            _load(rest_desc, m0, k, bar, x_ring.index(at).slice(0, BLOCK_M))
        else:
            _load(x_desc, m0, k, bar, x_ring.index(at))
        if FORM.tail > 0:
            _load(rest_desc, m0 + BLOCK_M, k, bar, tail_ring.index(at))
        step += 1
    return step


@gluon_jit
def _load_w(descs, ring, row, k, at, is_new, FORM: gl.constexpr, IS_CUT: gl.constexpr):
    """A place's tiles of W, if they are new; its barrier learns how much comes with those of x."""
    w_desc, up_desc, _x_desc, _rest_desc = descs
    w_ring, up_ring, x_ring, _tail_ring, ready, _empty = ring
    GROUPS: gl.constexpr = FORM.groups
    BLOCK_M: gl.constexpr = x_ring.shape[1] // (FORM.cuts if IS_CUT else 1)
    ROWS: gl.constexpr = (2 if FORM.is_gated else 1) * GROUPS * 64 + BLOCK_M + FORM.tail
    bar = ready.index(at)
    hopper.mbarrier.expect(bar, ROWS * x_ring.shape[2] * 2, pred=is_new)
    if FORM.has_turns:
        hopper.tma.async_copy_global_to_shared(
            w_desc, [row // 8, 0, 0, k], bar, w_ring.index(at), pred=is_new
        )
    elif FORM.groups == 2:
        _load(w_desc, row, k, bar, w_ring.index(at), is_new)
    else:
        for i in gl.static_range(GROUPS):
            _load(w_desc, row + i * 64, k, bar, w_ring.index(at * GROUPS + i), is_new)
    if FORM.is_gated:
        _load(up_desc, row, k, bar, up_ring.index(at), is_new)


@gluon_jit
def _load(desc, row, k, bar, to, is_new=True):
    hopper.tma.async_copy_global_to_shared(desc, [row, k], bar, to, pred=is_new)


@gluon_jit
def _multiply_upper(results, ring, sizes, FORM: gl.constexpr):
    _multiply(results, ring, sizes, FORM, 0)


@gluon_jit
def _multiply_lower(results, ring, sizes, FORM: gl.constexpr):
    _multiply(results, ring, sizes, FORM, 1)


@gluon_jit
def _multiply_third(results, ring, sizes, FORM: gl.constexpr):
    _multiply(results, ring, sizes, FORM, 2)


@gluon_jit
def _multiply(results, ring, sizes, FORM: gl.constexpr, GROUP: gl.constexpr):
    """What four warps do: their 64 rows of W's tile by the rows of x, and out."""
    extent = _extent(ring, sizes, FORM)
    step = 0
    num_written = 0
    BLOCK_K: gl.constexpr = ring[2].shape[2]
    share = _share(extent, sizes, FORM, BLOCK_K)
    tl.extra.cuda.gdc_wait()  # before flags are read and results written
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share[3] > 0:
            sums = _zeros(ring, FORM, False)
            sums, step = _added(ring, step, sums, share[3], FORM, GROUP, False, False)
            _leave(results, sums, FORM, GROUP)
    if FORM.is_late:
        step, num_written = _multiply_late(
            results, ring, sizes, extent, share, step, num_written, FORM, GROUP
        )
    else:
        for i in range(_num_own(extent, share, FORM)):
            item = _own(i, extent, share, FORM)
            place = _place(item, ring, extent, FORM, False)
            sums, step = _sums(ring, step, sizes, FORM, GROUP, False)
            num_written = _finish(results, place, sums, sizes, num_written, FORM, GROUP)
    if FORM.cuts > 1:
        for item in range(gl.program_id(0), extent[3], gl.num_programs(0)):
            place = _place(extent[2] * FORM.cuts + item, ring, extent, FORM, True)
            sums, step = _sums(ring, step, sizes, FORM, GROUP, True)
            num_written = _finish(results, place, sums, sizes, num_written, FORM, GROUP)
    if FORM.is_relay:  # noqa: SIM102  # what is compiled
        if share[1] > 0:
            place = _place(share[0], ring, extent, FORM, False)
            sums = _take_over(results, _zeros(ring, FORM, False), extent[1], FORM, GROUP)
            rest = split_blocks(sizes[2], BLOCK_K, FORM.splits) - share[1]
            sums, step = _added(ring, step, sums, rest, FORM, GROUP, False, True)
            num_written = _finish(results, place, sums, sizes, num_written, FORM, GROUP)
    hopper.tma.store_wait(0)


@gluon_jit
def _multiply_late(
    results, ring, sizes, extent, share, step, num_written, FORM: gl.constexpr, GROUP: gl.constexpr
):
    """A program's own items: results of each are held, and leave during the next one's products."""
    split, n0 = 0, 0
    m0 = sizes[0]  # below the last row: nothing is held yet, and nothing written
    zeros = _zeros(ring, FORM, False)
    held = _packed(_result(results, zeros, 0, sizes, FORM))
    for i in range(_num_own(extent, share, FORM)):
        item = _own(i, extent, share, FORM)
        place = _place(item, ring, extent, FORM, False)
        of_held = (split, n0, m0)
        sums, step, num_written = _sums_late(
            results, ring, step, sizes, held, of_held, num_written, FORM, GROUP
        )
        split, n0, m0 = place
        held = _packed(_result(results, sums, n0 + GROUP * results[1].shape[3], sizes, FORM))
    for i in gl.static_range(_num_pieces(ring, FORM)):
        num_written = _write_held(results, ring, (split, n0, m0), held, num_written, i, FORM, GROUP)
    return step, num_written


@gluon_jit
def _sums_late(
    results,
    ring,
    step,
    sizes,
    held,
    of_held,
    num_written,
    FORM: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The sums of one split; what is held leaves, a piece with each of the first blocks."""
    empty = ring[5]
    STAGES: gl.constexpr = FORM.num_stages
    PIECES: gl.constexpr = _num_pieces(ring, FORM)
    blocks = split_blocks(sizes[2], ring[2].shape[2], FORM.splits)
    sums = _zeros(ring, FORM, False)
    for i in gl.static_range(PIECES):
        hopper.mbarrier.wait(ring[4].index(step % STAGES), (step // STAGES) & 1)
        sums = _begin(ring, step % STAGES, sums, i > 0, FORM, GROUP, False)
        num_written = _write_held(results, ring, of_held, held, num_written, i, FORM, GROUP)
        sums = _wait(sums, 1)
        if i > 0:
            hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        step += 1
    sums, step = _added(ring, step, sums, blocks - PIECES, FORM, GROUP, False, True, True)
    return sums, step, num_written


@constexpr_function
def _num_pieces(ring, form):
    """Into how many a tile of results is cut on its way out."""
    return ring[2].shape[1] // OUT_ROWS


@gluon_jit
def _packed(y):
    """[n, rows] of 16 bits as [n, rows / 2] of 32: what a register holds."""
    even, odd = y.reshape([y.shape[0], y.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon_jit
def _write_held(
    results,
    ring,
    place,
    held,
    num_written,
    i: gl.constexpr,
    FORM: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The i-th piece of what is held."""
    out_desc, out_buffers, _bias_ptr, _room_ptr, _flags_ptr = results
    split, n0, m0 = place
    PIECES: gl.constexpr = _num_pieces(ring, FORM)
    ROWS: gl.constexpr = out_buffers.shape[2]
    packed = _piece(held, i, PIECES)
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [packed],
        dtype=(out_desc.dtype, out_desc.dtype),
        is_pure=True,
        pack=1,
    )
    y = gl.join(even, odd).reshape([packed.shape[0], ROWS])
    to = (out_desc, out_buffers, split, n0 + GROUP * out_buffers.shape[3])
    return _write(to, m0 + i * ROWS, y, num_written, GROUP)


@gluon_jit
def _piece(y, i: gl.constexpr, PIECES: gl.constexpr):
    """The i-th of equal pieces along the rows, without a move between registers."""
    if PIECES == 1:
        return y
    else:
        halves = y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute((0, 2, 1)).split()
        HALF: gl.constexpr = PIECES // 2
        if i < HALF:
            return _piece(halves[0], i, HALF)
        else:
            return _piece(halves[1], i - HALF, HALF)


@gluon_jit
def _sums(ring, step, sizes, FORM: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr):
    """All sums of an item; the next step."""
    WALKED: gl.constexpr = FORM.walked
    sums, step = _split_sums(ring, step, sizes, FORM, GROUP, IS_CUT)
    for _ in gl.static_range(1, WALKED):
        more, step = _split_sums(ring, step, sizes, FORM, GROUP, IS_CUT)
        sums = _add(sums, more)
    return sums, step


@gluon_jit
def _add(sums, more):
    COUNT: gl.constexpr = len(sums)
    if COUNT == 1:
        return (sums[0] + more[0],)
    elif COUNT == 2:
        return sums[0] + more[0], sums[1] + more[1]
    else:
        return sums[0] + more[0], sums[1] + more[1], sums[2] + more[2], sums[3] + more[3]


@gluon_jit
def _split_sums(ring, step, sizes, FORM: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr):
    """One split's sums: of W, of the up rows, and both again of the tail; the next step."""
    blocks = split_blocks(sizes[2], ring[2].shape[2], FORM.splits)
    sums = _zeros(ring, FORM, IS_CUT)
    return _added(ring, step, sums, blocks, FORM, GROUP, IS_CUT, False)


@gluon_jit
def _added(
    ring,
    step,
    sums,
    blocks,
    FORM: gl.constexpr,
    GROUP: gl.constexpr,
    IS_CUT: gl.constexpr,
    GOES_ON: gl.constexpr,
    IN_FLIGHT: gl.constexpr = False,
):
    """The sums with some blocks of K, from none unless it GOES_ON; the next step.

    Two blocks are in flight: a place is given back when the block after it has begun. IN_FLIGHT:
    a block before these is.
    """
    _w_ring, _up_ring, _x_ring, _tail_ring, ready, empty = ring
    STAGES: gl.constexpr = FORM.num_stages
    for i in range(blocks):
        hopper.mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
        is_later = True if GOES_ON else i > 0
        sums = _begin(ring, step % STAGES, sums, is_later, FORM, GROUP, IS_CUT)
        sums = _wait(sums, 1)
        has_before = True if IN_FLIGHT else i > 0
        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=has_before)
        step += 1
    sums = _wait(sums, 0)
    hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return sums, step


@gluon_jit
def _zeros(ring, FORM: gl.constexpr, IS_CUT: gl.constexpr):
    HALF: gl.constexpr = 64
    rows = _tile(HALF, ring[2].shape[1] // (FORM.cuts if IS_CUT else 1))
    if FORM.tail > 0:
        tail = _tile(HALF, FORM.tail)
        if FORM.is_gated:
            return rows, rows, tail, tail
        else:
            return rows, tail
    elif FORM.is_gated:
        return rows, rows
    else:
        return (rows,)


@gluon_jit
def _tile(HALF: gl.constexpr, ROWS: gl.constexpr):
    """A tile of sums in the registers of four warps."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    return gl.zeros([HALF, ROWS], gl.float32, LAYOUT)


@gluon_jit
def _begin(ring, at, sums, is_later, FORM: gl.constexpr, GROUP: gl.constexpr, IS_CUT: gl.constexpr):
    """Begin to add the products of one place of the ring."""
    w_ring, up_ring, x_ring, tail_ring, _ready, _empty = ring
    HALF: gl.constexpr = 64
    w = _rows_of_group(w_ring, at, FORM, GROUP)
    x = x_ring.index(at)
    if IS_CUT:
        x = x.slice(0, x_ring.shape[1] // FORM.cuts)
    first = _product(w, x, sums[0], is_later)
    if FORM.is_gated:
        up = up_ring.index(at).slice(GROUP * HALF, HALF)
        second = _product(up, x, sums[1], is_later)
        if FORM.tail > 0:
            tail = tail_ring.index(at)
            third = _product(w, tail, sums[2], is_later)
            return first, second, third, _product(up, tail, sums[3], is_later)
        else:
            return first, second
    elif FORM.tail > 0:
        return first, _product(w, tail_ring.index(at), sums[1], is_later)
    else:
        return (first,)


@gluon_jit
def _rows_of_group(w_ring, at, FORM: gl.constexpr, GROUP: gl.constexpr):
    """A group's 64 rows of a tile of W."""
    if FORM.has_turns:
        return w_ring.index(at).reshape([128, w_ring.shape[4]]).slice(GROUP * 64, 64)
    elif FORM.groups == 2:
        return w_ring.index(at).slice(GROUP * 64, 64)
    else:
        return w_ring.index(at * FORM.groups + GROUP)


@gluon_jit
def _product(w, x, sums, is_later):
    return hopper.warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=is_later, is_async=True)


@gluon_jit
def _wait(sums, BLOCKS: gl.constexpr):
    """Until no more than this many blocks are in flight."""
    COUNT: gl.constexpr = len(sums)
    if COUNT == 1:
        return (hopper.warpgroup_mma_wait(BLOCKS, sums),)
    else:
        return hopper.warpgroup_mma_wait(BLOCKS * COUNT, sums)


@gluon_jit
def _finish(results, place, sums, sizes, num_written, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Bias, silu, and out."""
    out_desc, out_buffers, bias_ptr, _room_ptr, _flags_ptr = results
    split, n0, m0 = place
    HALF: gl.constexpr = out_buffers.shape[3]
    n0 += GROUP * HALF
    to = (out_desc, out_buffers, split, n0)
    TAILS: gl.constexpr = 2 if FORM.is_gated else 1
    ups: gl.constexpr = 1 if FORM.is_gated else 0
    y = _activated(sums[0], sums[ups], bias_ptr, n0, sizes, FORM)
    num_written = _write(to, m0, y, num_written, GROUP)
    if FORM.tail > 0:
        y = _activated(sums[TAILS], sums[TAILS + ups], bias_ptr, n0, sizes, FORM)
        num_written = _write(to, m0 + sums[0].shape[1], y, num_written, GROUP)
    return num_written


@gluon_jit
def _result(results, sums, n0, sizes, FORM: gl.constexpr):
    """What _finish writes, of an item without a tail. n0: the group's first column."""
    y = _activated(sums[0], sums[1 if FORM.is_gated else 0], results[2], n0, sizes, FORM)
    return y.to(results[0].dtype)


@gluon_jit
def _leave(results, sums, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Unfinished sums, for the same warps of the same program of the next group."""
    place = gl.program_id(0) * 2 + GROUP
    for i in gl.static_range(len(sums)):
        gl.store(_left(results[3] + place * FORM.num_left, sums, i), sums[i])
    barrier()
    _write_flag(results[4] + place, 1)


@gluon_jit
def _take_over(results, sums, m_tiles, FORM: gl.constexpr, GROUP: gl.constexpr):
    """What the same warps have left in the group before. sums: tiles like them."""
    COUNT: gl.constexpr = len(sums)
    place = (gl.program_id(0) - m_tiles) * 2 + GROUP
    room_ptr = results[3] + place * FORM.num_left
    _await_flag(results[4] + place)
    barrier()
    _write_flag(results[4] + place, 0)
    if COUNT == 1:
        return (gl.load(_left(room_ptr, sums, 0)),)
    elif COUNT == 2:
        return gl.load(_left(room_ptr, sums, 0)), gl.load(_left(room_ptr, sums, 1))
    else:
        return (
            gl.load(_left(room_ptr, sums, 0)),
            gl.load(_left(room_ptr, sums, 1)),
            gl.load(_left(room_ptr, sums, 2)),
            gl.load(_left(room_ptr, sums, 3)),
        )


@gluon_jit
def _left(room_ptr, sums, i: gl.constexpr):
    """Where tile i of a group's sums is left."""
    LAYOUT: gl.constexpr = sums[i].type.layout
    HALF: gl.constexpr = sums[i].shape[0]
    ROWS: gl.constexpr = sums[i].shape[1]
    n = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    return room_ptr + i * HALF * sums[0].shape[1] + n[:, None] * ROWS + m[None, :]


@gluon_jit
def _write_flag(flag_ptr, value):
    """By one thread of the four warps, after what all of them wrote."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            @first st.release.gpu.global.s32 [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [
            flag_ptr + gl.zeros([128], gl.int32, EACH),
            value + gl.zeros([128], gl.int32, EACH),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def _await_flag(flag_ptr):
    """Until it is 1; each thread sees what was written before."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        """{
            .reg .pred is_unset;
        again:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.eq.s32 is_unset, $0, 0;
            @is_unset bra again;
        }""",
        "=r,l",
        [flag_ptr + gl.zeros([128], gl.int32, EACH)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def _activated(sums, up, bias_ptr, n0, sizes, FORM: gl.constexpr):
    """up: the sums themselves where nothing is gated."""
    if FORM.has_turns:
        HALF: gl.constexpr = sums.shape[0] // 16
        turns = sums.reshape([HALF, 2, 8, sums.shape[1]]).permute((0, 2, 3, 1))
        sums, up = turns.reshape([HALF * 8, sums.shape[1], 2]).split()
    if FORM.has_bias:
        sums += _bias(bias_ptr, n0, sizes, sums)
    if FORM.is_gated or FORM.has_turns:
        if FORM.has_bias:
            up += _bias(bias_ptr + sizes[1], n0, sizes, up)
        sums = _gated(sums, up)
    return sums


@gluon_jit
def _gated(sums, up):
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
def _bias(bias_ptr, n0, sizes, sums):
    """As a column beside a tile of sums, float32."""
    n = n0 + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
    return gl.load(bias_ptr + n, mask=n < sizes[1], other=0.0).to(gl.float32)[:, None]


@gluon_jit
def _write(to, m0, sums, num_written, GROUP: gl.constexpr):
    """Results [n, rows] to rows m0 on, a buffer at a time; each group's two take turns."""
    out_desc, out_buffers, split, n0 = to
    ROWS: gl.constexpr = sums.shape[1]
    AT_ONCE: gl.constexpr = out_buffers.shape[2]
    if ROWS > AT_ONCE:
        halves = sums.reshape([sums.shape[0], 2, ROWS // 2]).permute((0, 2, 1)).split()
        num_written = _write(to, m0, halves[0], num_written, GROUP)
        num_written = _write(to, m0 + ROWS // 2, halves[1], num_written, GROUP)
    else:
        buffer = out_buffers.index(GROUP * 2 + num_written % 2)
        hopper.tma.store_wait(1)
        barrier()
        buffer.reshape([ROWS, sums.shape[0]]).permute((1, 0)).store(sums.to(out_desc.dtype))
        hopper.fence_async_shared()
        barrier()
        hopper.tma.async_copy_shared_to_global(out_desc, [split, m0, n0], buffer)
        num_written += 1
    return num_written
