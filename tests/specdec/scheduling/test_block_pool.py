"""Blocks are allocated lowest first, each to one request, and found again by their keys."""

import random
from types import SimpleNamespace

import pytest

from specdec.scheduling.block_pool import BlockPool, RequestBlocks
from specdec.sizes import EngineSizes


def test_blocks_are_allocated_lowest_first():
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


def test_no_block_is_allocated_twice():
    pool = BlockPool(20)
    held = []
    chance = random.Random(0)
    for _ in range(500):
        if held and chance.random() < 0.5:
            pool.free(held.pop(chance.randrange(len(held))))
        else:
            held.append(pool.allocate(chance.randint(0, pool.num_free)))
        blocks = [block for request in held for block in request]
        assert len(set(blocks)) == len(blocks) == 20 - pool.num_free
        assert set(blocks) <= set(range(20))


def test_a_published_block_is_found_while_in_use_and_afterwards():
    pool = BlockPool(3)
    [a, b] = pool.allocate(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    assert pool.find([b"a", b"b", b"c"]) == [a, b]
    assert pool.find([b"c", b"a"]) == []
    pool.free([a, b])
    assert (pool.num_free, pool.find([b"a"])) == (3, [a])


def test_a_found_block_is_free_after_its_last_reference():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"a")
    pool.hold(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    pool.hold(blocks)
    assert pool.num_free == 1
    assert pool.allocate(1) != blocks


def test_blank_blocks_are_reused_first_then_the_least_recently_freed_ends_first():
    pool = BlockPool(5)
    old, young = pool.allocate(2), pool.allocate(2)
    for block in old + young:
        pool.publish(block, b"%d" % block)
    pool.free(old)
    pool.free(young)
    assert [pool.allocate(1) for _ in range(5)] == [[4], [old[1]], [old[0]], [young[1]], [young[0]]]
    assert pool.find([b"0"]) == pool.find([b"2"]) == []


def test_two_blocks_of_one_key_leave_the_first_one_to_be_found():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.free([second])
    assert pool.allocate(1) == [second]


def test_a_block_keeps_its_first_key():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[0], b"b")
    assert (pool.find([b"a"]), pool.find([b"b"])) == (blocks, [])
    pool.free(blocks)
    assert pool.allocate(1) == blocks
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([], [])


def test_unpublished_blocks_are_not_found_and_blank_again():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.free(blocks[:1])
    pool.unpublish(blocks)
    assert (pool.find([b"a"]), pool.find([b"b"]), pool.num_free) == ([], [], 1)
    pool.free(blocks[1:])
    assert sorted(pool.allocate(2)) == blocks


@pytest.mark.parametrize("block_rows, fits", [(0, 58), (3, 58), (4, 57)])
def test_a_round_and_the_proposal_after_it_stay_in_their_blocks(block_rows, fits):
    """Where only masks propose, a block has a row for its anchor as well."""
    sizes = EngineSizes(
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        num_kv_blocks=4,
        num_speculative_tokens=3,
        block_rows=block_rows,
    )
    blocks = RequestBlocks(BlockPool(4), sizes, use_prefix_cache=False)
    rules = SimpleNamespace(max_tokens=100)
    request = SimpleNamespace(prompt_token_ids=[0] * 40, rules=rules, num_speculative_tokens=3)
    assert [blocks.for_round(request, fits + more) for more in (0, 1)] == [1, 2]
    request.num_speculative_tokens = 0
    assert [blocks.for_round(request, 64 + more) for more in (0, 1)] == [1, 2]
