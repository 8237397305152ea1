"""The steps that are compiled ahead cover every kind of row count that an engine may have."""

from types import SimpleNamespace

import pytest

from specdec.kernels.tile_shapes import row_class
from specdec.start.compile_ahead import LOGPROB_ROWS, request_counts
from specdec.stepping.logprobs import ROWS_AT_ONCE


def kind(rows: int) -> tuple[int, int]:
    """What a kernel is compiled for: tiles, and what Triton knows of the number."""
    return row_class(rows), 1 if rows == 1 else 16 if rows % 16 == 0 else 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 40, 64, 300])
@pytest.mark.parametrize("query_len", [1, 2, 4, 6, 33])
def test_each_kind_of_row_count_is_compiled_ahead(max_num_seqs, query_len):
    runner = SimpleNamespace(sizes=SimpleNamespace(max_num_seqs=max_num_seqs))
    counts = list(request_counts(runner, query_len))
    assert max(counts) <= max_num_seqs
    every = {kind(count * query_len) for count in range(1, max_num_seqs + 1)}
    assert {kind(count * query_len) for count in counts} == every


def test_each_kind_of_prompt_rows_with_logprobs_is_compiled_ahead():
    every = {kind(rows) for rows in range(1, ROWS_AT_ONCE + 1)}
    assert {kind(rows) for rows in LOGPROB_ROWS} == every
