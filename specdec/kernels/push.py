"""Transfers by writing: each rank stores into the memory of the others, and waits for what they do.

A number travels in a word of 64 bits with the epoch of the exchange in its other half: whoever
reads a word of this epoch has the number, so nothing else has to say that it arrived. NCCL's
protocol LL is built so. Words are read and written as a whole, two at a time. Nothing is added on
the way but the parts that a rank's own product has left, in the order of sum_order.py.

A program has places of its own in the boxes, and counts its epochs on the device, so graphs repeat
them. It has two boxes in turn. A rank begins an exchange once it has ended the one before, in which
each of the others sent it something; so these had ended the one before that, and what lies in its
box may be written over. That holds if every exchange sends every rank something.

Where another rank never comes, a program waits until `stopped` says so, or for some 20 minutes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.overlap import begin
from specdec.kernels.sum_order import added

BLOCK = 1024  # numbers of 32 bits that a program sends to each rank
NUMBERS = 1 << 20  # that have room in a box
TRIES = 4096  # looks at what has not arrived, of a microsecond each, between two at `stopped`
LONGEST = 1 << 18  # of these, after which it gives up
GAVE_UP = 2


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory into which ranks write, as this rank knows it.

    addresses_n: int64, where each rank's boxes are, int64 [2, n, NUMBERS], for this device
    epochs:      int32 [NUMBERS / BLOCK]; they begin with 1, the words of boxes with 0
    stopped:     int32 [1] in memory of the host that the device knows; other than 0: programs wait
                 no more, and results are garbage. GAVE_UP is written by the device
    """

    addresses_n: Tensor
    epochs: Tensor
    stopped: Tensor
    rank: int


def can_push(num_bytes: int) -> bool:
    """Whether so much for each rank has room and is some words of 64 bits."""
    return num_bytes % 8 == 0 and 0 < num_bytes <= 4 * NUMBERS


def push_all(own_PX: Tensor, out_nX: Tensor, boxes: Boxes) -> None:
    """Collect what every rank has, [n, ...]: the sum of its parts [P, ...].

    One part may be of any dtype, several are float32. Both tensors are contiguous, here and below,
    and all ranks make the same calls in one order, with tensors of the same shapes and dtypes.
    """
    parts = len(own_PX)
    assert parts == 1 or own_PX.dtype == torch.float32, own_PX.dtype
    assert own_PX.is_contiguous(), own_PX.stride()
    own = own_PX if parts > 1 else _bits(own_PX)
    _launch(own, out_nX, boxes, out_nX[0].nbytes, out_nX[0].nbytes, PARTS=parts, IS_DEALT=False)


def push_rows(own_TD: Tensor, out_nRD: Tensor, boxes: Boxes, num_rows: int) -> None:
    """Deal rows: rank r collects those from r x num_rows on, up to as many and at least one."""
    assert (len(out_nRD) - 1) * num_rows < len(own_TD), (num_rows, own_TD.shape)
    each = num_rows * own_TD[0].nbytes
    _launch(_bits(own_TD), out_nRD, boxes, each, own_TD.nbytes, PARTS=1, IS_DEALT=True)


def push_in_all_forms(boxes: Boxes, num_ranks: int) -> None:
    """Launch each kernel that there is, to compile them."""
    own_nX = boxes.addresses_n.new_zeros(num_ranks, 2, dtype=torch.float32)
    out_nX = torch.empty_like(own_nX)
    for parts in (1, 2):
        push_all(own_nX[:1].expand(parts, -1).contiguous(), out_nX, boxes)
    push_rows(own_nX, out_nX[:, None], boxes, 1)


def _bits(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)


def _launch(
    own: Tensor, out: Tensor, boxes: Boxes, each: int, total: int, **constants: int
) -> None:
    """each: bytes for a rank; total: of all that is dealt."""
    at = boxes.addresses_n, boxes.epochs, boxes.stopped, boxes.rank
    sizes = {"RANKS": len(out), "BLOCK": BLOCK, "NUMBERS": NUMBERS}
    limits = {"TRIES": TRIES, "LONGEST": LONGEST, "GAVE_UP": GAVE_UP}
    _push_kernel[(-(-each // (4 * BLOCK)),)](
        _bits(out),
        *(own, *at, each // 8, total // 8),
        num_warps=4,
        **constants,
        **sizes,
        **limits,
        **launch_options(out),
    )


@jit(varying=("rank", "pairs", "all_pairs"))
def _push_kernel(
    out_ptr,  # [RANKS, W]; of dealt rows as many as this rank has
    own_ptr,  # [1, W], or [PARTS, W] float32; dealt: as many words as all_pairs says
    addresses_ptr,  # [RANKS]
    epochs_ptr,  # [NUMBERS / BLOCK]
    stopped_ptr,  # [1]
    rank,
    pairs,  # W / 2
    all_pairs,
    PARTS: tl.constexpr,
    IS_DEALT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    TRIES: tl.constexpr,
    LONGEST: tl.constexpr,
    GAVE_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    p = tl.program_id(0)
    W = pairs * 2
    at = p * BLOCK + tl.arange(0, BLOCK)
    epoch = tl.load(epochs_ptr + p)
    turn = (epoch & 1) * RANKS
    mine = W
    if IS_DEALT:
        mine = tl.minimum(pairs, all_pairs - rank * pairs) * 2
    inside = at < mine
    own = added(own_ptr + (rank * W if IS_DEALT else 0), 0, 1, W, at, inside, 0, PARTS)
    if PARTS > 1:
        own = own.to(tl.int32, bitcast=True)
    for i in tl.static_range(1, RANKS):
        to = (rank + i) % RANKS
        sent, is_sent = own, inside
        if IS_DEALT:
            is_sent = at < tl.minimum(pairs, all_pairs - to * pairs) * 2
            sent = tl.load(own_ptr + to * W + at, mask=is_sent, other=0)
        word = (epoch.to(tl.int64) << 32) | (sent.to(tl.int64) & 0xFFFFFFFF)
        box = _box(addresses_ptr, to) + (turn + rank) * NUMBERS
        tl.store(box + at, word, mask=is_sent, cache_modifier=".wt")
    tl.store(out_ptr + rank * mine + at, own, mask=inside)
    for i in tl.static_range(1, RANKS):
        by = (rank + i) % RANKS
        box = _box(addresses_ptr, rank) + (turn + by) * NUMBERS
        word = tl.load(box + at, mask=inside, other=0, volatile=True)
        is_late = _is_late(word, epoch, inside)
        tries = 0
        while is_late:
            word = tl.load(box + at, mask=inside, other=0, volatile=True)
            is_late = _is_late(word, epoch, inside)
            tries += 1
            if tries % TRIES == 0:
                is_late = is_late & _goes_on(stopped_ptr, at, tries // TRIES, LONGEST, GAVE_UP)
        tl.store(out_ptr + by * mine + at, word.to(tl.int32), mask=inside)
    tl.store(epochs_ptr + p, epoch + 1)


@jit
def _box(addresses_ptr, rank):
    """Find a rank's boxes. Compilers have to know that two words are read at a time."""
    address = tl.load(addresses_ptr + rank)
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@jit
def _is_late(word, epoch, inside):
    """Whether a number of this epoch is still on its way."""
    is_old = inside & ((word >> 32).to(tl.int32) != epoch)
    return tl.max(is_old.to(tl.int32), axis=0) != 0


@jit
def _goes_on(stopped_ptr, at, looks, LONGEST: tl.constexpr, GAVE_UP: tl.constexpr):
    """Whether to wait on. All threads look, and one answer is taken for all of them."""
    if looks >= LONGEST:
        tl.store(stopped_ptr, GAVE_UP)
    return tl.max(tl.load(stopped_ptr + at * 0, volatile=True), axis=0) == 0
