"""Transfers by writing: each rank stores into the memory of the others, and waits for their words.

A number travels in a word of 64 bits with the count of the exchange beside it, its epoch: whoever
reads a word of this epoch has the number, so nothing else has to say that it arrived. NCCL's
protocol LL is built so. Words are read and written as a whole, two at a time. Nothing is added on
the way but the parts that a rank's own product has left, in the order of sum_order.py.

A program has an epoch and places in the boxes of its own. There are two boxes in turn: a rank that
writes into one has read all words of the exchange before, so the others had read those of the one
before that, and they may be written over. Epochs are counted on the device, so graphs repeat them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.overlap import begin
from specdec.kernels.sum_order import added

BLOCK = 1024  # numbers of 32 bits that a program sends to each rank
NUMBERS = 1 << 20  # that one rank can send to another
TRIES = 4096  # reads of a word between looks at whether the exchange was stopped


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory into which ranks write, as this rank knows it.

    addresses_n: int64, where each rank's boxes [2, n, NUMBERS] int64 are, for this device
    epochs:      int32 [NUMBERS / BLOCK]; they begin with 1, the words of the boxes with 0
    stopped:     int32 [1] in memory of the host that the device reads; 0, or wait no more
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
    own = own_PX if parts > 1 else _bits(own_PX)
    _launch(own, out_nX, boxes, out_nX[0].nbytes, out_nX[0].nbytes, PARTS=parts, IS_DEALT=False)


def push_rows(own_TD: Tensor, out_nRD: Tensor, boxes: Boxes, num_rows: int) -> None:
    """Deal rows: rank r collects every rank's rows from r x num_rows on, up to as many."""
    each = num_rows * own_TD[0].nbytes
    _launch(_bits(own_TD), out_nRD, boxes, each, own_TD.nbytes, PARTS=1, IS_DEALT=True)


def _bits(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)


def _launch(
    own: Tensor, out: Tensor, boxes: Boxes, each: int, total: int, **constants: int
) -> None:
    """each: bytes for a rank; total: of all that is dealt."""
    at = boxes.addresses_n, boxes.epochs, boxes.stopped, boxes.rank
    sizes = {"RANKS": len(out), "BLOCK": BLOCK, "MOST": NUMBERS, "TRIES": TRIES, "num_warps": 4}
    grid = (-(-each // (4 * BLOCK)),)
    options = {**constants, **sizes, **launch_options(out)}
    _push_kernel[grid](_bits(out), own, *at, each // 8, total // 8, **options)


@jit(varying=("rank", "pairs", "all_pairs"))
def _push_kernel(
    out_ptr,  # [RANKS, W]; of dealt rows as many as this rank has
    own_ptr,  # [1, W], or [PARTS, W] float32; dealt: as many words as all_pairs says
    addresses_ptr,  # [RANKS]
    epochs_ptr,  # [programs]
    stopped_ptr,  # [1]
    rank,
    pairs,  # W / 2
    all_pairs,
    PARTS: tl.constexpr,
    IS_DEALT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    TRIES: tl.constexpr,
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
        place = _box(addresses_ptr, to) + (turn + rank) * MOST + at
        tl.store(place, word, mask=is_sent, cache_modifier=".wt")
    tl.store(out_ptr + rank * mine + at, own, mask=inside)
    for i in tl.static_range(1, RANKS):
        other = (rank + i) % RANKS
        place = _box(addresses_ptr, rank) + (turn + other) * MOST + at
        found = tl.load(place, mask=inside, other=0, volatile=True)
        is_late = _is_late(found, epoch, inside)
        tries = 0
        while is_late:
            found = tl.load(place, mask=inside, other=0, volatile=True)
            is_late = _is_late(found, epoch, inside)
            tries += 1
            if tries % TRIES == 0:
                is_late = is_late & (tl.load(stopped_ptr, volatile=True) == 0)
        tl.store(out_ptr + other * mine + at, found.to(tl.int32), mask=inside)
    tl.store(epochs_ptr + p, epoch + 1)


@jit
def _box(addresses_ptr, rank):
    """Find a rank's boxes. Compilers have to know that two words are read at a time."""
    address = tl.load(addresses_ptr + rank)
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@jit
def _is_late(found, epoch, inside):
    """Whether a number of this epoch is still on its way."""
    is_old = inside & ((found >> 32).to(tl.int32) != epoch)
    return tl.max(is_old.to(tl.int32), axis=0) != 0
