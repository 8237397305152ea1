"""What rank 0 tells the others, as plain data: numbers, tuples and the bytes of arrays.

A message is its kind and values. Prompts are sent as far as a step reads them, so a step takes some
hundred bytes.
"""

import marshal
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, overload

import numpy as np

from specdec.requests.params import SamplingFlags
from specdec.rounds.step_sizes import RowMasks
from specdec.rounds.upload import RowStart
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import BLOCK_SIZE, DraftShape

Plain = tuple[Any, ...]


class Kind(IntEnum):
    STEP = 0
    MASKS = 1  # of the step before
    ROWS = 2
    THRESHOLD = 3
    FACTORS = 4
    PLACED = 5  # numbers of state rows, at the start
    DECIDED = 6  # what rank 0 has decided at the start
    BUILD = 7  # a runner, by a plan
    SERVE = 8  # its start is over
    END = 9


def packed(kind: Kind, *values: Any) -> bytes:
    return marshal.dumps((int(kind), *values))


def unpacked(message: bytes) -> tuple[Kind, Plain]:
    kind, *values = marshal.loads(message)
    return Kind(kind), tuple(values)


def of_round(round: Round, max_seq_len: int, flags: SamplingFlags, is_guided: bool) -> Plain:
    """Write a step: a round, and what its graphs and its sampler go by."""
    return (
        _bytes(round.state_rows),
        tuple(round.shape),
        int(round.shared_rows),
        tuple(round.next_shape),
        tuple(_of_part(part) for part in round.parts),
        int(max_seq_len),
        tuple(flags),
        is_guided,
    )


def to_round(values: Plain) -> tuple[Round, int, SamplingFlags, bool]:
    """Read what of_round has written."""
    rows, shape, shared_rows, next_shape, parts, max_seq_len, flags, is_guided = values
    round = Round(
        state_rows=_integers(rows),
        shape=DraftShape(*shape),
        shared_rows=shared_rows,
        next_shape=DraftShape(*next_shape),
        parts=[_to_part(*part) for part in parts],
    )
    return round, max_seq_len, SamplingFlags(*flags), is_guided


def _of_part(part: PromptPart) -> Plain:
    end = part.start + part.length
    return (
        part.state_row,
        len(part.prompt),
        _bytes(part.prompt[part.start : end + 1]),  # a draft embeds the token after the last
        part.start,
        part.length,
        _bytes(part.blocks[: -(-end // BLOCK_SIZE)]),
        part.num_logprobs,
        part.is_resumed,
    )


def _to_part(
    state_row: int,
    num_tokens: int,
    tokens: bytes,
    start: int,
    length: int,
    blocks: bytes,
    num_logprobs: int | None,
    is_resumed: bool,
) -> PromptPart:
    return PromptPart(
        state_row=state_row,
        prompt=Window(num_tokens, start, _integers(tokens)),
        start=start,
        length=length,
        blocks=_integers(blocks),
        num_logprobs=num_logprobs,
        is_resumed=is_resumed,
    )


class Window(Sequence[int]):
    """Stands for a prompt of which a part was sent. IndexError for tokens that were not."""

    def __init__(self, num_tokens: int, start: int, tokens: Sequence[int]) -> None:
        self._num_tokens = num_tokens
        self._start = start
        self._tokens = tokens

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        places = range(self._num_tokens)[at]
        wanted = places if isinstance(places, range) else range(places, places + 1)
        first, last = wanted.start - self._start, wanted.stop - self._start
        if len(wanted) and (wanted.step != 1 or first < 0 or last > len(self._tokens)):
            raise IndexError(f"tokens {at} of a prompt, of which {len(self._tokens)} were sent")
        found = self._tokens[max(first, 0) : max(last, 0)]
        return found if isinstance(at, slice) else found[0]


def of_rows(starts: Sequence[tuple[int, RowStart]], grown: Sequence[tuple[int, int, int]]) -> Plain:
    """Write state rows that start, and blocks of others; see Runner.start_rows."""
    return (pickle.dumps(([(row, _lean(start)) for row, start in starts], [*grown])),)


def _lean(start: RowStart) -> RowStart:
    """Leave out a prompt of which only the length is read: its tokens come with its parts."""
    sampling = start.sampling
    if sampling.has_penalties or sampling.bad_words:
        return start
    return replace(start, sampling=replace(sampling, prompt=range(len(sampling.prompt))))


def to_rows(values: Plain) -> tuple[list[tuple[int, RowStart]], list[tuple[int, int, int]]]:
    """Read what of_rows has written."""
    starts, grown = pickle.loads(values[0])
    return starts, grown


def of_masks(masks: RowMasks) -> Plain:
    return masks.row_X.tobytes(), masks.bits_XW.tobytes()


def to_masks(values: Plain) -> RowMasks:
    rows, bits = values
    row_X = np.frombuffer(bytearray(rows), np.int64)
    return RowMasks(row_X, np.frombuffer(bytearray(bits), np.int32).reshape(len(row_X), -1))


def _bytes(numbers: Sequence[int]) -> bytes:
    return array("q", numbers).tobytes()


def _integers(data: bytes) -> "array[int]":
    return array("q", data)
