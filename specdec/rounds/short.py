"""Steps with prompts that one graph serves: the tiles of query rows are listed for each step.

A graph of a round knows how many rows each batch slot has. Of a step with prompts it knows only how
many all have; so its attention takes query tiles from a list, which the host writes.
"""

from collections.abc import Iterator

import numpy as np

from specdec.kernels.attention.query_rows import LISTED_ROWS
from specdec.scheduling.work import Round
from specdec.sizes import EngineSizes

# Up to how many rows, keys of a request, and products of a prompt's row and key: each tile of a
# prompt reads all keys before it, where the kernel for long prompts reads them for many rows.
SHORT_ROWS, SHORT_KEYS, SHORT_SCORES = 256, 4096, 1 << 18
SHORT = "short"  # the kind of the graphs


def is_short(round: Round, max_seq_len: int) -> bool:
    """Whether one graph may serve a step with prompts, if there is one of so many rows."""
    scores = sum(part.length * (part.start + part.length) for part in round.parts)
    return not round.shape.is_wide and max_seq_len <= SHORT_KEYS and scores <= SHORT_SCORES


def num_listed_tiles(num_rows: int, sizes: EngineSizes) -> int:
    """Bound the query tiles of a short step of so many rows."""
    of_slot = -(-sizes.query_len // LISTED_ROWS)
    return num_rows // LISTED_ROWS + min(num_rows, sizes.max_num_seqs) * of_slot


def listed_tiles(round: Round, num_tiles: int) -> np.ndarray:
    """List the query tiles of a short step as QueryRows has them, then some without rows: [X, 3].

    The device alone knows how many rows are shared out to a slot: it has tiles for the most.
    """
    found = [*_of_verified(round), *_of_prompts(round)]
    tiles_X3 = np.zeros((num_tiles, 3), np.int64)
    tiles_X3[: len(found)] = found
    return tiles_X3


def _of_verified(round: Round) -> Iterator[tuple[int, int, int]]:
    rows = round.shape.rows
    for b in range(round.num_verified):
        for first in range(0, rows, LISTED_ROWS):
            if round.shared_rows:
                yield b, -1 - first // LISTED_ROWS, 0
            else:
                yield b, b * rows + first, (b + 1) * rows


def _of_prompts(round: Round) -> Iterator[tuple[int, int, int]]:
    end = round.num_verify_rows
    for b, part in enumerate(round.parts, round.num_verified):
        first, end = end, end + part.length
        for row in range(first, end, LISTED_ROWS):
            yield b, row, end
