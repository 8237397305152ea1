"""What each step computes: admission, prompts beside rounds, growth, preemption, prefixes."""

from dataclasses import replace

import pytest

from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import Detokenizer
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.costs import PromptBudget, StepCosts
from specdec.scheduling.planner import RoundPlan
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.work import work_of
from specdec.sizes import PLAIN, DraftShape, EngineSizes, TreeShape, chain

K = 3


def scheduler(
    num_blocks=8,
    max_num_seqs=2,
    budget=10,
    max_model_len=256,
    use_prefix_cache=False,
    prompt_budget=None,
    planner=None,
    tree=None,
):
    sizes = EngineSizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        num_speculative_tokens=K,
        is_adaptive=planner is not None,
        tree=tree,
    )
    return Scheduler(BlockPool(num_blocks), sizes, use_prefix_cache, prompt_budget, planner)


def request(number, num_prompt_tokens, max_tokens=10, priority=0, k=K, first=0, **params):
    return Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=list(range(first, first + num_prompt_tokens)),
        params=SamplingParams(temperature=0.0, **params),
        rules=FinishRules(max_tokens=max_tokens),
        detokenizer=Detokenizer(None),
        stats=RequestStats(),
        priority=priority,
        number=number,
        num_speculative_tokens=k,
    )


def samples(name, first_number, count, num_prompt_tokens=5, **values):
    """The samples of one caller's request."""
    made = [request(first_number + i, num_prompt_tokens, **values) for i in range(count)]
    for each in made:
        each.request_id = name
    return made


def added(made, *requests):
    for each in requests:
        made.add(each)
    return requests


def finish_step(made, work, num_tokens=1, token=7):
    """Take a step's results: `num_tokens` for each request that verifies."""
    counts = [num_tokens] * len(work.verifying) + [int(part.samples) for part in work.parts]
    for each, count in zip(work.requests, counts, strict=True):
        if each.finish is None:
            each.append([token] * count, 0.0)
    made.finish_step(work)
    return work


def step(made, num_tokens=1):
    """A step as ids that verify, rows of each, and parts [(id, start, length)...]; or None."""
    work = made.schedule().work
    if work is None:
        return None
    finish_step(made, work, num_tokens)
    pairs = zip(work.prompts, work.parts, strict=True)
    parts = [(each.request_id, part.start, part.length) for each, part in pairs]
    return names(work.verifying), work.shape.rows, parts


def prompts(*parts):
    """A step in which nothing verifies."""
    return [], 1, list(parts)


def names(requests):
    return [each.request_id for each in requests]


@pytest.mark.parametrize(
    "num_prompt_tokens, max_tokens, blocks",
    [(1, 1, 1), (50, 11, 1), (50, 12, 2), (64, 64, 3), (200, 56, 4), (1, 999, 4)],
)
def test_blocks_cover_the_context_and_the_last_drafts_up_to_max_model_len(
    num_prompt_tokens, max_tokens, blocks
):
    assert scheduler().blocks.needed(request(1, num_prompt_tokens, max_tokens)) == blocks


@pytest.mark.parametrize("num_prompt_tokens, num_blocks", [(58, 1), (59, 2), (122, 2), (123, 3)])
def test_a_prompt_comes_with_blocks_for_its_first_round_and_the_drafts_after_it(
    num_prompt_tokens, num_blocks
):
    made = scheduler()
    [a] = added(made, request(1, num_prompt_tokens, max_tokens=50))
    made.schedule()
    # of 64 slots, of which a round and the next drafts take up to 2 K
    assert len(a.blocks) == num_blocks


def test_requests_are_admitted_in_order_while_rows_last():
    made = scheduler()
    a, b, c = added(made, request(1, 5), request(2, 5), request(3, 5))
    assert made.schedule().admitted == [a, b]
    assert (a.state_row, a.blocks, b.state_row, b.blocks, c.state_row) == (0, [0], 1, [1], -1)
    assert made.waiting == [c]


def test_lower_priorities_go_first_then_earlier_arrivals():
    made = scheduler(max_num_seqs=4, budget=64)
    added(made, request(1, 5, priority=1), request(2, 5), request(3, 5, priority=-1), request(4, 5))
    assert names(made.waiting) == ["3", "2", "4", "1"]
    assert names(made.schedule().work.requests) == ["3", "2", "4", "1"]


def test_a_request_that_does_not_fit_yet_holds_back_later_ones():
    made = scheduler(num_blocks=3, max_num_seqs=4)
    a, _, _ = added(made, request(1, 100), request(2, 100), request(3, 5))
    assert made.schedule().admitted == [a]
    assert made.schedule().admitted == []


def test_admission_leaves_a_block_for_each_that_may_still_grow():
    made = scheduler(num_blocks=3, max_num_seqs=4)
    a, b, c = added(
        made,
        request(1, 10, max_tokens=100),
        request(2, 10, max_tokens=10),
        request(3, 10, max_tokens=10),
    )
    assert made.schedule().admitted == [a, b]
    assert made.pool.num_free == 1
    assert c.state_row == -1


def test_many_samples_leave_the_next_free_row_to_another_request():
    made = scheduler(num_blocks=64, max_num_seqs=4, budget=64)
    many = added(made, *samples("many", 1, 64))
    step(made)
    [single] = added(made, request(65, 5))
    while single.state_row < 0:
        assert step(made)
    assert sum(each.finish is not None for each in many) == 4
    assert names(made.waiting) == ["many"] * (64 - 4 - 3)


def test_the_samples_of_two_requests_share_the_rows():
    made = scheduler(num_blocks=64, max_num_seqs=4, budget=64)
    added(made, *samples("a", 1, 30), *samples("b", 31, 30))
    for _ in range(30):
        assert step(made)
        assert sorted(names(made.prefilling + made.running)) in (["a", "a", "b", "b"], [])


def test_single_requests_that_never_cease_leave_samples_a_row():
    made = scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    many = added(made, *samples("many", 1, 8, max_tokens=3))
    for number in range(9, 100):
        added(made, request(number, 5, max_tokens=3))
        step(made)
    assert all(each.finish is not None for each in many)
    assert len(made.waiting) > 20


def test_a_lower_priority_goes_before_fairness():
    made = scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    added(made, *samples("many", 1, 4, priority=-1), request(5, 5))
    assert names(made.schedule().admitted) == ["many", "many"]


def test_the_last_sample_is_preempted_before_another_request():
    made = scheduler(num_blocks=8, max_num_seqs=3, budget=256)
    first, second = added(made, *samples("many", 1, 2, 60, max_tokens=100))
    [single] = added(made, request(3, 60, max_tokens=100))
    while not any(each.stats.num_preemptions for each in (first, second, single)):
        assert step(made)
    assert (second.stats.num_preemptions, single.stats.num_preemptions) == (1, 0)
    while made.has_unfinished:
        step(made)
    assert (first.stats.num_preemptions, made.pool.num_free) == (0, 8)


def test_where_more_arrives_than_the_budget_allows_no_queue_builds_up():
    slow = StepCosts(rounds=((8, 1.0),), mixed=((64, 1.4), (128, 3.0), (256, 6.0)))
    budget = PromptBudget(costs=slow, slowdown=1.5)
    made = scheduler(num_blocks=4000, max_num_seqs=8, budget=4096, prompt_budget=budget)
    waiting = []
    for number in range(400):
        while len(made.waiting) + len(made.prefilling) + len(made.running) < 8:
            added(made, request(number, 200, max_tokens=6))
        step(made)
        waiting.append(len(made.prefilling))
    assert sum(waiting[-100:]) / 100 < 3  # of 8; with 64 rows for each step, 7


def test_prompts_ride_in_every_step_in_order():
    made = scheduler(max_num_seqs=4)
    added(made, request(1, 4), request(2, 23), request(3, 3))
    assert [step(made) for _ in range(4)] == [
        ([], 1, [("1", 0, 4), ("2", 0, 6)]),
        (["1"], K + 1, [("2", 6, 10)]),
        (["1"], K + 1, [("2", 16, 7), ("3", 0, 3)]),
        (["1", "2", "3"], K + 1, []),
    ]


def test_as_many_rows_of_prompts_ride_as_the_costs_allow():
    costs = StepCosts(rounds=((64, 4.0),), mixed=((64, 4.0), (128, 5.0), (256, 6.0), (512, 9.0)))
    made = scheduler(
        num_blocks=99,
        max_num_seqs=4,
        budget=400,
        max_model_len=999,
        prompt_budget=PromptBudget(costs=costs, slowdown=1.5),
    )
    added(made, request(1, 4, max_tokens=99), request(2, 900))
    assert step(made) == prompts(("1", 0, 4), ("2", 0, 396))  # nothing runs: all that is allowed
    assert step(made) == (["1"], K + 1, [("2", 396, 252)])  # 256 rows take 1.5 times as long as 4
    assert step(made) == (["1"], K + 1, [("2", 648, 252)])


@pytest.mark.parametrize("lengths, num_riding", [([3000], 124), ([400] * 8, 252)])
def test_steps_grow_for_many_prompts_that_wait_but_not_for_one_long_prompt(lengths, num_riding):
    costs = StepCosts(rounds=((64, 4.0),), mixed=((64, 4.0), (128, 5.0), (256, 6.0), (512, 9.0)))
    made = scheduler(
        num_blocks=999,
        max_num_seqs=9,
        budget=400,
        max_model_len=4000,
        prompt_budget=PromptBudget(costs=costs, slowdown=1.25),
    )
    added(made, request(1, 4, max_tokens=99))
    step(made)
    added(made, *(request(number, length) for number, length in enumerate(lengths, start=2)))
    _, _, parts = step(made)
    assert sum(length for _, _, length in parts) == num_riding


class Listed:
    """A planner whose shapes are given, and which keeps what it was told."""

    def __init__(self, *shapes):
        self.shapes, self.told = list(shapes), []

    def plan(self, coming):
        self.told.append(coming)
        rows = coming.num_requests * coming.live.rows
        return RoundPlan(rows, self.shapes.pop(0) if self.shapes else PLAIN)


def test_drafts_of_every_shape_are_verified_in_the_next_step_whatever_follows_them():
    tree = TreeShape(num_levels=K, top_k=2, num_nodes=5)
    shape = tree.of(1).drafts
    order = [chain(2), shape, chain(3), shape, PLAIN, chain(1), PLAIN, PLAIN]
    made = scheduler(num_blocks=99, planner=Listed(*order), tree=tree)
    added(made, request(1, 4, max_tokens=99))
    live = PLAIN
    for following in order:
        work = made.schedule().work
        assert made.planner.told[-1].live == live
        assert work.num_verify_rows == len(work.verifying) * live.rows
        assert work.shape.is_wide == (live == shape)
        assert work.next_shape == following
        assert work.most_drafts == live.levels
        finish_step(made, work)
        live = following


def test_a_planner_is_told_of_prompts_that_ride_and_of_the_kinds_of_requests():
    made = scheduler(num_blocks=99, max_num_seqs=4, budget=64, planner=Listed())
    greedy, sampled = request(1, 4, max_tokens=99), request(2, 4, max_tokens=99)
    sampled.params = SamplingParams(temperature=1.0)
    added(made, greedy)
    step(made)
    added(made, sampled, request(3, 40, k=0))
    step(made)
    step(made)
    first, second, third = made.planner.told
    assert (first.num_requests, first.kind, first.num_prompt_rows) == (1, 0, 0)
    assert (second.num_requests, second.kind, second.num_prompt_rows) == (1, 0, 44)
    assert (third.num_requests, third.num_drafting, third.kind) == (3, 2, None)


def test_one_token_at_a_time_ends_every_prompt():
    made = scheduler(budget=1)
    added(made, request(1, 2, max_tokens=1), request(2, 1, max_tokens=1))
    parts = [("1", 0, 1), ("1", 1, 1), ("2", 0, 1)]
    assert [step(made) for _ in parts] == [prompts(part) for part in parts]
    assert not made.has_unfinished


def test_a_round_without_drafts_has_one_row_each():
    made = scheduler()
    added(made, request(1, 4, k=0), request(2, 4, k=0))
    step(made)
    assert step(made) == (["1", "2"], 1, [])
    mixed = scheduler()
    added(mixed, request(1, 4, k=0), request(2, 4, k=2))
    step(mixed)
    assert step(mixed) == (["1", "2"], K + 1, [])


def test_an_ended_request_gives_its_row_and_blocks_to_the_next():
    made = scheduler(num_blocks=2)
    a, b, c = added(made, request(1, 5), request(2, 5, max_tokens=1), request(3, 5))
    step(made)
    assert (b.finish.reason, b.state_row, b.blocks, made.pool.num_free) == ("length", -1, [], 1)
    assert made.schedule().admitted == [c]
    assert (c.state_row, c.blocks) == (1, [1])
    assert a.state_row == 0


def test_what_an_ended_request_holds_waits_for_the_last_step_in_flight():
    made = scheduler(budget=64)
    a, _ = added(made, request(1, 5, max_tokens=50), request(2, 5, max_tokens=50))
    first, second = made.schedule().work, made.schedule().work
    assert (len(second.verifying), second.parts) == (2, [])
    a.end("abort")
    made.drop(a)
    finish_step(made, first)
    assert (a.state_row, made.pool.num_free) == (0, 6)
    finish_step(made, second)
    assert (a.state_row, a.blocks, made.pool.num_free) == (-1, [], 7)


def test_a_spare_row_starts_a_request_while_an_ended_one_holds_its_own():
    made = scheduler(budget=64)
    a, b, c, d = added(made, *(request(number, 5, max_tokens=50) for number in range(1, 5)))
    made.schedule()
    made.schedule()
    a.end("abort")
    made.drop(a)
    assert made.schedule().admitted == [c]
    assert {a.state_row, b.state_row, c.state_row} == {0, 1, 2}
    assert d.state_row == -1  # two at a time


def test_no_round_is_launched_for_a_request_that_steps_in_flight_will_end():
    made = scheduler(budget=64)
    [a] = added(made, request(1, 5, max_tokens=2))
    in_flight = [made.schedule().work, made.schedule().work]
    assert made.schedule().work is None
    for work in in_flight:
        finish_step(made, work)
    assert a.finish.reason == "length"
    assert not made.has_unfinished


@pytest.mark.parametrize(
    "rows, num_tokens",
    [
        ({"shape": chain(K)}, K + 1),
        ({"shape": PLAIN}, 1),
        ({"shape": chain(K), "shared_rows": 9, "num_live": 2}, 3),
        ({"shape": chain(K), "shared_rows": 9}, 1),
        ({"shape": DraftShape(K, 4, 15)}, K + 1),
        ({"shape": DraftShape(K, 4, 2)}, 3),
        ({"shape": DraftShape(2, 4, 15)}, 3),
    ],
)
def test_a_round_brings_no_more_tokens_than_its_drafts_have_levels(rows, num_tokens):
    own = [request(0, 5), request(1, 5, k=1)]
    work = replace(work_of(own, PLAIN, PLAIN), **rows)
    assert work.token_bounds == [(1, num_tokens), (1, min(num_tokens, 2))]


def test_blocks_are_taken_ahead_of_rounds_in_flight():
    made = scheduler(num_blocks=4, budget=64)
    [a] = added(made, request(1, 49, max_tokens=100))
    finish_step(made, made.schedule().work)
    counts = []
    # 50 tokens, then at most 4 more with each round in flight; a round needs 2 K slots
    for _ in range(3):
        made.schedule()
        counts.append(len(a.blocks))
    assert counts == [1, 1, 1]
    assert made.schedule().grown == [(0, 1, 1)]


def test_the_last_in_order_is_preempted_when_blocks_are_short():
    made = scheduler(num_blocks=5, max_num_seqs=2, budget=256)
    a, b = added(made, request(1, 60, max_tokens=100), request(2, 60, max_tokens=100, priority=1))
    while not b.stats.num_preemptions:
        assert step(made)
    assert (b.state_row, b.blocks, names(made.waiting), names(made.running)) == (
        -1,
        [],
        ["2"],
        ["1"],
    )
    assert a.stats.num_preemptions == 0
    while made.has_unfinished:
        step(made)
    assert (len(a.token_ids), len(b.token_ids), made.pool.num_free) == (100, 100, 5)


def test_the_only_running_request_is_preempted_for_a_prompt_of_higher_priority():
    made = scheduler(num_blocks=6, max_num_seqs=2, budget=1)
    [a] = added(made, request(1, 10, max_tokens=150, priority=1))
    while not a.token_ids:
        step(made)
    [b] = added(made, request(2, 190))
    while not a.stats.num_preemptions:
        seen = step(made, num_tokens=K + 1)
    assert seen[0] == []  # its own place went to the prompt
    assert (names(made.waiting), names(made.prefilling), made.num_in_flight) == (["1"], ["2"], 0)
    while made.has_unfinished:
        step(made)
    assert (len(a.token_ids), len(b.token_ids), made.pool.num_free) == (150, 10, 6)


def test_a_preempted_request_computes_its_tokens_again():
    made = scheduler(num_blocks=5, max_num_seqs=2, budget=256)
    _, b = added(made, request(1, 60, max_tokens=80), request(2, 60, max_tokens=80))
    while b.state_row >= 0 or not b.stats.num_preemptions:
        assert step(made)
    num_tokens = b.num_tokens
    while b.state_row < 0:
        seen = step(made)
        assert seen
    # the last token is the first row of the next round
    assert seen == prompts(("2", 0, num_tokens - 1))
    assert b.num_tokens == num_tokens > 60


def test_no_request_is_preempted_while_a_step_in_flight_may_free_blocks():
    made = scheduler(num_blocks=5, max_num_seqs=2, budget=256)
    a, b = added(made, request(1, 60, max_tokens=100), request(2, 60, max_tokens=100))
    step(made)
    in_flight = []
    while (plan := made.schedule()).work is not None:
        in_flight.append(plan.work)
    assert (a.stats.num_preemptions, b.stats.num_preemptions) == (0, 0)
    assert in_flight
    for work in in_flight:
        finish_step(made, work)
    assert made.schedule().work is not None


def test_the_beginning_of_a_prompt_is_found_and_one_token_is_always_computed():
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    added(made, request(1, 200, max_tokens=1))
    step(made)
    added(
        made,
        request(2, 200, max_tokens=1),
        request(3, 193, max_tokens=1),
        request(4, 192, max_tokens=1),
    )
    assert step(made) == prompts(("2", 192, 8), ("3", 192, 1), ("4", 128, 64))


def test_a_block_is_found_only_with_the_token_after_it():
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    added(made, request(1, 130, max_tokens=1))
    step(made)
    other = request(2, 130, max_tokens=1)
    other.prompt_token_ids[128] = 999  # the draft's entry at 127 would embed another token
    added(made, other)
    assert step(made) == prompts(("2", 64, 66))


def test_a_block_is_found_only_after_the_blocks_before_it():
    made = scheduler(num_blocks=12, max_num_seqs=3, budget=400, use_prefix_cache=True)
    first, other, shared = (list(range(start, start + 64)) for start in (0, 100, 200))
    texts = [[*first, *shared, 5, 6], [*other, shared[0], *first, 5], [*other, *shared, 5, 6]]
    for number, prompt in enumerate(texts):
        asked = request(number, 0, max_tokens=1)
        asked.prompt_token_ids = prompt
        added(made, asked)
        seen = step(made)
    assert seen == prompts(("2", 64, 66))


def test_generated_tokens_are_found_too():
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    [a] = added(made, request(1, 60, max_tokens=80))
    while made.has_unfinished:
        step(made)
    follow_up = request(2, 0, max_tokens=1)
    follow_up.prompt_token_ids = a.tokens(0, a.num_tokens)
    added(made, follow_up)
    assert step(made) == prompts(("2", 128, 12))
    assert follow_up.stats.num_cached_tokens == 128


@pytest.mark.parametrize("num_tokens, num_found", [(128, 64), (129, 128)])
def test_the_last_block_of_a_text_is_found_with_one_token_after_it(num_tokens, num_found):
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    [a] = added(made, request(1, 60, max_tokens=num_tokens - 60))
    while made.has_unfinished:
        step(made)
    follow_up = request(2, 0, max_tokens=1)
    follow_up.prompt_token_ids = [*a.tokens(0, a.num_tokens), 5]
    added(made, follow_up)
    assert step(made) == prompts(("2", num_found, num_tokens + 1 - num_found))


def test_what_a_failed_request_computes_is_not_found_while_its_last_step_is_in_flight():
    made = scheduler(num_blocks=9, budget=130, use_prefix_cache=True)
    [a] = added(made, request(1, 250))
    first, second = made.schedule().work, made.schedule().work
    a.end("error")
    a.has_faulty_blocks = True
    made.drop(a)
    made.finish_step(first)
    assert (a.num_in_flight, len(a.keys), made.pool.find(a.keys)) == (1, 3, [])
    made.finish_step(second)
    assert (made.pool.num_free, made.pool.find(a.keys)) == (9, [])


def test_a_preempted_request_whose_prompt_has_its_logprobs_finds_its_blocks_again():
    made = scheduler(num_blocks=9, budget=300, use_prefix_cache=True)
    [a] = added(made, request(1, 130, prompt_logprobs=1))
    step(made)
    made._preempt(a)
    assert step(made) == prompts(("1", 128, 2))  # all but the token that it had sampled
    assert a.stats.num_cached_tokens == 0  # when it came


def test_an_error_that_says_nothing_of_the_cache_leaves_its_blocks_to_be_found():
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    [a] = added(made, request(1, 200, max_tokens=5))
    step(made)
    a.end("error", "no token is left")
    made.drop(a)
    [b] = added(made, request(2, 200, max_tokens=1))
    assert step(made) == prompts(("2", 192, 8))
    assert b.stats.num_cached_tokens == 192


def test_rounds_without_drafts_publish_no_blocks():
    made = scheduler(num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=True)
    [a] = added(made, request(1, 60, max_tokens=80, k=0))
    while made.has_unfinished:
        step(made)
    follow_up = request(2, 0, max_tokens=1)
    follow_up.prompt_token_ids = a.tokens(0, a.num_tokens)
    added(made, follow_up)
    assert step(made) == prompts(("2", 0, 140))


@pytest.mark.parametrize("is_off", ["by the switch", "prompt_logprobs", "faulty blocks"])
def test_nothing_is_found_with(is_off):
    made = scheduler(
        num_blocks=9, max_num_seqs=3, budget=300, use_prefix_cache=is_off != "by the switch"
    )
    [a] = added(made, request(1, 200, max_tokens=5))
    step(made)
    if is_off == "faulty blocks":
        a.end("error")
        a.has_faulty_blocks = True
        made.drop(a)
    added(
        made,
        request(
            2, 200, max_tokens=1, **({"prompt_logprobs": 1} if is_off == "prompt_logprobs" else {})
        ),
    )
    verifies = [] if is_off == "faulty blocks" else ["1"]
    assert step(made) == (verifies, K + 1 if verifies else 1, [("2", 0, 200)])
