"""What the host writes to the device: numbers, and state rows of requests that start with a step.

Nothing waits: the source of copies is pinned memory that is reused, so none asks an allocator.
State rows, and cache blocks of requests that grow, are sent in one copy and one launch, since each
small launch costs a step 3 microseconds.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, pick, tl
from specdec.kernels.overlap import begin
from specdec.requests.params import SamplingStart
from specdec.rounds.state import RequestState, SamplingRows
from specdec.sizes import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_STOP_IDS

STAGED_BYTES = 1 << 20  # of each half; a step needs a few kilobytes
ALIGNMENT = 16

# columns of a request that starts: its row, K, and position from which stop ids may be drawn; the
# integers and the bits of the floats of SamplingRows; stop ids; then its blocks
NUM_INTEGERS, NUM_FLOATS = 4, 6
INTEGERS = 3
FLOATS = INTEGERS + NUM_INTEGERS
STOP_IDS = FLOATS + NUM_FLOATS
BLOCKS = STOP_IDS + MAX_STOP_IDS
AT_ONCE = 128  # blocks of a request, or of requests that grow


def upload(buffer: Tensor, values: np.ndarray | Tensor) -> None:
    """Write `values`, which lie on the host, to the first rows of `buffer`."""
    buffer[: len(values)].copy_(_staged(values, buffer.device), non_blocking=True)


def upload_all(pairs: Sequence[tuple[Tensor, np.ndarray]]) -> None:
    """Write integers to several int64 buffers, as `upload` does, in one copy."""
    device = pairs[0][0].device
    staged = uploaded(np.concatenate([values for _, values in pairs]), device)
    sizes = [len(values) for _, values in pairs]
    places = [buffer[:size] for (buffer, _), size in zip(pairs, sizes, strict=True)]
    torch._foreach_copy_(places, torch.split(staged, sizes))


def uploaded(values: np.ndarray, device: torch.device) -> Tensor:
    return _staged(values, device).to(device, non_blocking=True)


class Staging:
    """Pinned memory in two halves that take turns.

    A half is written again only after the copies from it are over, on all streams that they ran on.
    halves: of bytes
    """

    def __init__(self, device: torch.device, halves: tuple[Tensor, Tensor]) -> None:
        self._device = device
        self._halves = halves
        self._copied: list[list[Any]] = [[], []]  # events after the last copies from each half
        self._streams: dict[Any, None] = {}  # that copy from this half
        self._half = 0
        self._at = 0

    @staticmethod
    def of(device: torch.device) -> "Staging":
        """Allocate the staging memory of a device."""
        one, other = (torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab")
        return Staging(device, (one, other))

    def put(self, values: Tensor) -> Tensor:
        """Write the values to pinned memory, for a copy launched next on the current stream."""
        if values.nbytes > len(self._halves[0]):
            return values.pin_memory()
        if self._at + values.nbytes > len(self._halves[0]):
            self._turn()
        place = self._halves[self._half][self._at : self._at + values.nbytes]
        self._at += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        self._streams[torch.cuda.current_stream(self._device)] = None
        place = place.view(values.dtype).view(values.shape)
        # not by torch, which wakes other threads for 32,768 numbers: that can take milliseconds
        np.copyto(place.numpy(), values.numpy())
        return place

    def _turn(self) -> None:
        """Switch to the other half, once nothing is copied from it any more."""
        self._copied[self._half] = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        self._half = 1 - self._half
        self._at = 0
        for event in self._copied[self._half]:
            event.synchronize()


class OfThread(threading.local):
    """The staging memory of a thread, since a step's copies come from one thread."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Staging] = {}


_of_thread = OfThread()


def _staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return what a copy to the device may read from.

    The driver stages copies of pageable memory, and may wait for the stream to do so.
    """
    host = torch.as_tensor(values)
    if device.type != "cuda":
        return host
    known = _of_thread.by_device
    if device not in known:
        known[device] = Staging.of(device)
    return known[device].put(host)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """A state row at its start.

    generated: after a preemption its tokens but the last, which the end of prefill counts.
    """

    blocks: Sequence[int]
    num_draft_tokens: int
    min_position: int = 0  # below it, stop_ids are never drawn
    stop_ids: Sequence[int] = ()
    sampling: SamplingStart = field(default_factory=SamplingStart)
    generated: Sequence[int] = ()


def start_rows(
    state: RequestState,
    starts: Sequence[tuple[int, RowStart]],
    grown: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Write the rows in stream order, after all that was launched before.

    starts: state rows, and what is written to each. No row is given twice.
    grown: further blocks of others: (row, place in the block table, cache block) each
    """
    for row, start in starts:
        _write_large(state.sampling, row, start.sampling, start.generated)
    if not starts and not grown:
        return
    width = BLOCKS + max((len(start.blocks) for _, start in starts), default=0)
    rows = [_columns(state, row, start, width) for row, start in starts]
    packed_X = uploaded(np.array([*itertools.chain(*rows, *grown)]), state.block_table.device)
    write = pick(packed_X, launch_start_rows, start_rows_ref)
    write(state, packed_X, len(rows), width)


def _columns(state: RequestState, row: int, start: RowStart, width: int) -> list[int]:
    stop_ids = [*start.stop_ids] or [0]
    blocks = [*start.blocks]
    return [
        row,
        start.num_draft_tokens,
        start.min_position if start.stop_ids else 0,
        *state.sampling.integers_of(start.sampling),
        *np.array(state.sampling.floats_of(start.sampling), np.float32).view(np.int32).tolist(),
        *stop_ids,
        *stop_ids[:1] * (MAX_STOP_IDS - len(stop_ids)),
        *blocks,
        *[state.scratch_block] * (width - BLOCKS - len(blocks)),
    ]


def _write_large(
    rows: SamplingRows, row: int, start: SamplingStart, generated: Sequence[int]
) -> None:
    """Write what has a width of its own, where this request or the one before it uses it."""
    has_bias = bool(start.logit_bias) or start.allowed_token_ids is not None
    if _is_written(row, has_bias, rows.in_use["bias"]):
        upload(rows.bias[row], _bias(start, rows.vocab_size))
    if _is_written(row, start.has_penalties, rows.in_use["counts"]):
        in_prompt = np.zeros(rows.vocab_size, np.bool_)
        in_prompt[list(start.prompt)] = True
        upload(rows.in_prompt[row], in_prompt)
        counts = np.bincount(np.array(generated, np.int64), minlength=rows.vocab_size)
        upload(rows.output_counts[row], counts.astype(np.int32))
    if _is_written(row, bool(start.bad_words), rows.in_use["bad words"]):
        words, lengths = _bad_words(start)
        upload(rows.bad_words[row], words)
        upload(rows.bad_lengths[row], lengths)
        upload(rows.history[row, len(start.prompt) :], np.array(generated, np.int64))


def _is_written(row: int, is_used: bool, rows_in_use: set[int]) -> bool:
    """Whether a row has to be written: it is used now, or holds what another request left."""
    was_used = row in rows_in_use
    rows_in_use.add(row) if is_used else rows_in_use.discard(row)
    return is_used or was_used


def _bias(start: SamplingStart, vocab_size: int) -> np.ndarray:
    bias = np.zeros(vocab_size, np.float32)
    if start.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(start.allowed_token_ids)] = 0
    for token, value in start.logit_bias.items():
        bias[token] += value
    return bias


def _bad_words(start: SamplingStart) -> tuple[np.ndarray, np.ndarray]:
    words = np.zeros((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), np.int64)
    lengths = np.zeros(MAX_BAD_WORDS, np.int64)
    for i, word in enumerate(start.bad_words):
        words[i, MAX_BAD_WORD_LENGTH - len(word) :] = word
        lengths[i] = len(word)
    return words, lengths


def launch_start_rows(state: RequestState, packed_X: Tensor, num_starts: int, width: int) -> None:
    num_grown = (len(packed_X) - num_starts * width) // 3
    bounds = state.num_draft_tokens, state.min_positions
    progress = state.num_computed_tokens, state.num_nodes
    sampling = state.sampling.integers, state.sampling.floats, state.stop_ids
    sizes = state.block_table.shape[1], state.scratch_block, num_starts, num_grown, width
    _start_rows_kernel[(num_starts + -(-num_grown // AT_ONCE),)](
        *(packed_X, *bounds, *progress, *sampling, state.block_table, *sizes),
        INTEGERS=INTEGERS,
        NUM_INTEGERS=NUM_INTEGERS,
        FLOATS=FLOATS,
        NUM_FLOATS=NUM_FLOATS,
        STOP_IDS=STOP_IDS,
        NUM_IDS=MAX_STOP_IDS,
        BLOCKS=BLOCKS,
        AT_ONCE=AT_ONCE,
        num_warps=4,
        **launch_options(packed_X),
    )


@jit(varying=("scratch_block", "num_starts", "num_grown", "width"))
def _start_rows_kernel(
    packed_ptr,  # [num_starts, width], then [num_grown, 3]
    num_drafts_ptr,  # [R + 1]
    min_positions_ptr,  # [R + 1]
    num_computed_ptr,  # [R + 1]
    num_live_ptr,  # [R + 1]
    integers_ptr,  # [R + 1, NUM_INTEGERS]
    floats_ptr,  # [R + 1, NUM_FLOATS] float32
    stop_ids_ptr,  # [R + 1, NUM_IDS]
    block_table_ptr,  # [R + 1, M]
    M,
    scratch_block,
    num_starts,
    num_grown,
    width,
    INTEGERS: tl.constexpr,
    NUM_INTEGERS: tl.constexpr,
    FLOATS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run a program for each request that starts, then one for each AT_ONCE blocks of others."""
    begin(PDL)
    i = tl.program_id(0)
    many = tl.arange(0, AT_ONCE)
    if i < num_starts:
        packed_ptr += i * width
        row = tl.load(packed_ptr)
        tl.store(num_drafts_ptr + row, tl.load(packed_ptr + 1))
        tl.store(min_positions_ptr + row, tl.load(packed_ptr + 2))
        tl.store(num_computed_ptr + row, tl.zeros((), tl.int64))
        tl.store(num_live_ptr + row, tl.zeros((), tl.int64))
        few = tl.arange(0, 8)
        integers = tl.load(packed_ptr + INTEGERS + few, mask=few < NUM_INTEGERS)
        tl.store(integers_ptr + row * NUM_INTEGERS + few, integers, mask=few < NUM_INTEGERS)
        bits = tl.load(packed_ptr + FLOATS + few, mask=few < NUM_FLOATS, other=0)
        floats = bits.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(floats_ptr + row * NUM_FLOATS + few, floats, mask=few < NUM_FLOATS)
        id = tl.arange(0, NUM_IDS)
        tl.store(stop_ids_ptr + row * NUM_IDS + id, tl.load(packed_ptr + STOP_IDS + id))
        for first in range(0, M, AT_ONCE):
            place = first + many
            is_given = BLOCKS + place < width
            block = tl.load(packed_ptr + BLOCKS + place, mask=is_given, other=scratch_block)
            tl.store(block_table_ptr + row * M + place, block, mask=place < M)
    else:
        which = (i - num_starts) * AT_ONCE + many
        is_real = which < num_grown
        packed_ptr += num_starts * width
        row_X = tl.load(packed_ptr + 3 * which, mask=is_real, other=0)
        place_X = tl.load(packed_ptr + 3 * which + 1, mask=is_real, other=0)
        block_X = tl.load(packed_ptr + 3 * which + 2, mask=is_real, other=0)
        tl.store(block_table_ptr + row_X * M + place_X, block_X, mask=is_real)


def start_rows_ref(state: RequestState, packed_X: Tensor, num_starts: int, width: int) -> None:
    packed_BX = packed_X[: num_starts * width].view(num_starts, width)
    row_B = packed_BX[:, 0]
    state.num_draft_tokens[row_B] = packed_BX[:, 1]
    state.min_positions[row_B] = packed_BX[:, 2]
    state.num_computed_tokens[row_B] = 0
    state.num_nodes[row_B] = 0
    state.sampling.integers[row_B] = packed_BX[:, INTEGERS:FLOATS]
    state.sampling.floats[row_B] = (
        packed_BX[:, FLOATS:STOP_IDS].int().view(state.sampling.floats.dtype)
    )
    state.stop_ids[row_B] = packed_BX[:, STOP_IDS:BLOCKS]
    state.block_table[row_B] = state.scratch_block
    state.block_table[row_B, : width - BLOCKS] = packed_BX[:, BLOCKS:]
    row_X, place_X, block_X = packed_X[num_starts * width :].view(-1, 3).unbind(dim=1)
    state.block_table[row_X, place_X] = block_X
