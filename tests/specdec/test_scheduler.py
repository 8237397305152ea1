"""Prompts first, oldest first; a request is admitted when its row and every block it can need are free."""

import pytest

from specdec.block_pool import BlockPool
from specdec.finish import FinishRules
from specdec.request import Request
from specdec.sampling import SamplingParams
from specdec.scheduler import Scheduler
from specdec.stats import RequestStats

K = 3


def scheduler(num_blocks=8, max_num_seqs=2, budget=10, max_model_len=256):
    return Scheduler(BlockPool(num_blocks), max_num_seqs, budget, max_model_len)


def request(name, num_prompt_tokens, max_tokens=10):
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=SamplingParams(temperature=0.0),
        rules=FinishRules(max_tokens=max_tokens),
        detokenizer=None,
        stats=RequestStats(),
    )


def added(made, *requests):
    for each in requests:
        made.add(each)
    return requests


def run_chunk(made):
    """Parts of the next chunk as (request, start, length), taken as computed."""
    chunk = made.next_chunk()
    for each, part in chunk:
        assert (part.row, part.blocks, part.prompt) == (each.row, each.blocks, each.prompt_token_ids)
        made.prefilled(each, part.length)
    return [(each.request_id, part.start, part.length) for each, part in chunk]


@pytest.mark.parametrize(
    "num_prompt_tokens, max_tokens, blocks",
    [(1, 1, 1), (50, 11, 1), (50, 12, 2), (64, 64, 3), (200, 56, 4), (1, 999, 4)],
)
def test_blocks_cover_the_context_and_the_last_drafts_up_to_max_model_len(num_prompt_tokens, max_tokens, blocks):
    assert scheduler().blocks_needed(num_prompt_tokens, max_tokens, K) == blocks


def test_requests_are_admitted_oldest_first_while_rows_last():
    made = scheduler()
    a, b, c = added(made, request("a", 5), request("b", 5), request("c", 5))
    assert made.admit(K) == [a, b]
    assert (a.row, a.blocks, b.row, b.blocks, c.row) == (0, [0], 1, [1], -1)
    assert (list(made.waiting), made.prefilling, made.running) == ([c], [a, b], [])


def test_a_request_that_does_not_fit_yet_holds_back_those_behind_it():
    made = scheduler(num_blocks=3, max_num_seqs=4)
    a, _, _ = added(made, request("a", 100), request("big", 100), request("small", 5))
    assert made.admit(K) == [a]
    assert made.admit(K) == []


def test_prompts_are_packed_into_chunks_in_order():
    made = scheduler(max_num_seqs=4)
    added(made, request("a", 4), request("b", 13), request("c", 3))
    made.admit(K)
    assert run_chunk(made) == [("a", 0, 4), ("b", 0, 6)]
    assert [each.request_id for each in made.running] == ["a"]
    assert run_chunk(made) == [("b", 6, 7), ("c", 0, 3)]
    assert run_chunk(made) == []
    assert [each.request_id for each in made.running] == ["a", "b", "c"]


def test_one_token_at_a_time_ends_every_prompt():
    made = scheduler(budget=1)
    added(made, request("a", 2), request("b", 1))
    made.admit(K)
    assert [run_chunk(made) for _ in range(3)] == [[("a", 0, 1)], [("a", 1, 1)], [("b", 0, 1)]]


def test_a_released_request_gives_its_row_and_blocks_to_the_next():
    made = scheduler(num_blocks=2)
    a, b, c = added(made, request("a", 5), request("b", 5), request("c", 5))
    made.admit(K)
    run_chunk(made)
    made.release(b)
    assert (b.row, b.blocks, made.pool.num_free) == (-1, [], 1)
    assert made.admit(K) == [c]
    assert (c.row, c.blocks) == (1, [1])
    run_chunk(made)
    made.release(a)
    made.release(c)
    assert not made.has_unfinished
    assert made.pool.num_free == 2
