"""Blocks are handed out lowest first, each to one holder."""

import random

import pytest

from specdec.block_pool import BlockPool


def test_blocks_are_handed_out_lowest_first():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.allocate(0), pool.allocate(1)) == (1, [], [3])


def test_freed_blocks_come_back_in_their_order():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert (pool.num_free, pool.allocate(4)) == (4, [0, 1, 2, 3])


def test_more_than_is_free_is_a_bug_of_ours():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_freed_twice_is_a_bug_of_ours():
    pool = BlockPool(2)
    [block], _ = pool.allocate(1), pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="block 1 is freed twice"):
        pool.free([1, 1])


def test_no_block_has_two_holders():
    pool, held, chance = BlockPool(20), [], random.Random(0)
    for _ in range(500):
        if held and chance.random() < 0.5:
            pool.free(held.pop(chance.randrange(len(held))))
        else:
            held.append(pool.allocate(chance.randint(0, pool.num_free)))
        blocks = [block for request in held for block in request]
        assert len(set(blocks)) == len(blocks) == 20 - pool.num_free
        assert set(blocks) <= set(range(20))
