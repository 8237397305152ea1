"""Transfers by writing: each rank stores into the memory of the others, and waits for what they do.

A program sends a block of numbers of 32 bits to each rank. There are two ways to say that they have
arrived, both of them known from NCCL's protocols:

    few     (LL)      each number is half a word of 64 bits, and the epoch of the exchange the other
                      half: whoever reads a word of this epoch has the number; twice the bytes
    many    (Simple)  numbers alone, and after them the epoch in a flag of the block: one more way
                      over the link, after all that was written has arrived

Nothing is added on the way but the parts that a rank's own product has left, in the order of
sum_order.py.

A program has places of its own in the boxes, and counts its epochs on the device, so graphs repeat
them. It has two boxes in turn: a rank that writes into one has read what came in the exchange
before, so the others had ended the one before that, and what lies there may be written over.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, tl
from specdec.kernels.overlap import begin
from specdec.kernels.sum_order import added

FEW = 1 << 17  # numbers for one rank that go with epochs beside them
MANY = 1 << 21  # that have room in a box
BLOCK_OF_FEW, BLOCK_OF_MANY = 1024, 4096
NUM_PROGRAMS = MANY // BLOCK_OF_MANY
TRIES = 4096  # looks at what has not arrived between two at whether the exchange was stopped


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory into which ranks write, as this rank knows it.

    addresses_n: int64, where each rank's memory of words_of(n) words of 64 bits is, for this device
    epochs:      int32 [2, NUM_PROGRAMS], of few and of many; they begin with 1, the words with 0
    stopped:     int32 [1] in memory of the host that the device reads; 0, or wait no more
    """

    addresses_n: Tensor
    epochs: Tensor
    stopped: Tensor
    rank: int


def words_of(num_ranks: int) -> int:
    """Count the words of a rank's memory: boxes of few, of many, and flags of these."""
    return num_ranks * (2 * FEW + MANY + NUM_PROGRAMS)


def can_push(num_bytes: int) -> bool:
    """Whether so much for each rank has room and is some words of 64 bits."""
    return num_bytes % 8 == 0 and 0 < num_bytes <= 4 * MANY


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
    are_few = each <= 4 * FEW
    block = BLOCK_OF_FEW if are_few else BLOCK_OF_MANY
    sizes = {"FEW": FEW, "MANY": MANY, "NUM_PROGRAMS": NUM_PROGRAMS, "TRIES": TRIES}
    constants |= {"ARE_FEW": are_few, "RANKS": len(out), "BLOCK": block, **sizes}
    at = boxes.addresses_n, boxes.epochs[int(not are_few)], boxes.stopped, boxes.rank
    _push_kernel[(-(-each // (4 * block)),)](
        _bits(out),
        *(own, *at, each // 8, total // 8),
        num_warps=4 if are_few else 8,
        **constants,
        **launch_options(out),
    )


@jit(varying=("rank", "pairs", "all_pairs"))
def _push_kernel(
    out_ptr,  # [RANKS, W]; of dealt rows as many as this rank has
    own_ptr,  # [1, W], or [PARTS, W] float32; dealt: as many words as all_pairs says
    addresses_ptr,  # [RANKS]
    epochs_ptr,  # [NUM_PROGRAMS]
    stopped_ptr,  # [1]
    rank,
    pairs,  # W / 2
    all_pairs,
    PARTS: tl.constexpr,
    IS_DEALT: tl.constexpr,
    ARE_FEW: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
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
        few, many, flag = _places(addresses_ptr, to, turn, rank, p, RANKS, FEW, MANY, NUM_PROGRAMS)
        if ARE_FEW:
            word = (epoch.to(tl.int64) << 32) | (sent.to(tl.int64) & 0xFFFFFFFF)
            tl.store(few + at, word, mask=is_sent, cache_modifier=".wt")
        else:
            tl.store(many + at, sent, mask=is_sent)
            tl.debug_barrier()
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    tl.store(out_ptr + rank * mine + at, own, mask=inside)
    for i in tl.static_range(1, RANKS):
        by = (rank + i) % RANKS
        few, many, flag = _places(addresses_ptr, rank, turn, by, p, RANKS, FEW, MANY, NUM_PROGRAMS)
        tries = 0
        if ARE_FEW:
            word = tl.load(few + at, mask=inside, other=0, volatile=True)
            is_late = _is_late(word, epoch, inside)
            while is_late:
                word = tl.load(few + at, mask=inside, other=0, volatile=True)
                is_late = _is_late(word, epoch, inside)
                tries += 1
                if tries % TRIES == 0:
                    is_late = is_late & (tl.load(stopped_ptr, volatile=True) == 0)
            found = word.to(tl.int32)
        else:
            # the other rank may be in the next exchange already
            is_late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0
            while is_late:
                is_late = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0
                tries += 1
                if tries % TRIES == 0:
                    is_late = is_late & (tl.load(stopped_ptr, volatile=True) == 0)
            found = tl.load(many + at, mask=inside, other=0, cache_modifier=".cg")
        tl.store(out_ptr + by * mine + at, found, mask=inside)
    tl.store(epochs_ptr + p, epoch + 1)


@jit
def _places(
    addresses_ptr,
    rank,
    turn,
    by,
    p,
    RANKS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Find the boxes of a rank for what another one sends, and the flag of a program.

    Compilers have to know that 16 bytes may be read and written at a time.
    """
    address = tl.load(addresses_ptr + rank)
    few = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    many = address + (turn + by) * (MANY * 4) + 2 * RANKS * FEW * 8
    many = tl.multiple_of(many.to(tl.pointer_type(tl.int32)), 16)
    flag = address + RANKS * (2 * FEW + MANY) * 8 + (by * NUM_PROGRAMS + p) * 8
    return few + (turn + by) * FEW, many, flag.to(tl.pointer_type(tl.int32))


@jit
def _is_late(word, epoch, inside):
    """Whether a number of this epoch is still on its way."""
    is_old = inside & ((word >> 32).to(tl.int32) != epoch)
    return tl.max(is_old.to(tl.int32), axis=0) != 0
