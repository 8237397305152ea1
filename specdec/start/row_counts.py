"""Numbers of rows that kernels tell apart: by their tiles, or as one row or a multiple of 16."""

import itertools
from collections.abc import Iterator

from specdec.kernels.experts.tiles import class_of
from specdec.kernels.tile_shapes import ROW_CLASSES
from specdec.sizes import EngineSizes


def counts_by_kind(query_len: int, most: int) -> Iterator[int]:
    """List one row, rows that are a multiple of 16, and others, of each class of row counts.

    most: requests of `query_len` rows
    """
    for low, high in itertools.pairwise((0, *ROW_CLASSES)):
        found: dict[int, int] = {}  # by what the compiler knows of a count
        for count in range(low // query_len + 1, min(high // query_len, most) + 1):
            rows = count * query_len
            found.setdefault(1 if rows == 1 else 16 if rows % 16 == 0 else 0, count)
        yield from found.values()


def counts_by_class_of_experts(most: int) -> list[int]:
    """List the fewest rows of each class that only the experts' tiles tell from others."""
    known = {class_of(rows) for rows in counts_by_kind(1, most)}
    fewest = {class_of(rows): rows for rows in range(most, 0, -1)}
    return [rows for each, rows in fewest.items() if each not in known]


def lengths_of(sizes: EngineSizes, rows: int) -> list[int]:
    """Cut rows into as few prompts as hold them, as far as the engine's sizes allow."""
    longest = sizes.max_model_len - 1
    rows = min(rows, sizes.max_num_seqs * longest)
    return [min(longest, rows - at) for at in range(0, rows, longest)]
