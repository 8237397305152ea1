"""A rank's part of heads, experts and ids."""

import pytest

from weights.shard import (
    WHOLE,
    Shard,
    num_vocabulary_blocks,
    vocabulary_block,
    vocabulary_borders,
)

VOCABULARIES = [8, 40, 96, 1024, 4096, 32000, 49155, 128256, 151936]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [8, 16, 40])
def test_equal_parts_are_neighbours_and_cover_all(count, size):
    parts = [Shard(rank, size).range_of(count) for rank in range(size)]
    assert [each for part in parts for each in part] == list(range(count))
    assert len({len(part) for part in parts}) == 1


def test_ranks_share_what_is_fewer_than_they_are():
    held = [list(Shard(rank, 8).range_of(2)) for rank in range(8)]
    assert held == [[0]] * 4 + [[1]] * 4


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_ids_are_cut_at_borders_of_blocks(vocab_size, size):
    borders = vocabulary_borders(vocab_size, size)
    block = vocabulary_block(vocab_size)
    assert (len(borders), borders[0], borders[-1]) == (size + 1, 0, vocab_size)
    assert all(border % block == 0 for border in borders[:-1])
    sizes = [len(Shard(rank, size).ids_of(vocab_size)) for rank in range(size)]
    assert sum(sizes) == vocab_size
    assert min(sizes) > 0
    # the last block may be short
    assert max(sizes) - min(sizes) < 2 * block


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_vocabulary_has_blocks_for_eight_ranks(vocab_size):
    assert num_vocabulary_blocks(vocab_size) >= 8


def test_whole_is_all():
    assert WHOLE.range_of(7) == range(7)
    assert WHOLE.ids_of(151936) == range(151936)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_none(rank):
    with pytest.raises(AssertionError, match=f"rank {rank} of 2"):
        Shard(rank, 2)
