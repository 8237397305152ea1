"""The scheduler against a model of the device: whatever arrives, finishes late, is aborted or
preempted, a step reads only cache entries that its request's own tokens have made.

An entry of the target's cache is modelled as the tokens up to its position, one of the draft's as
those and one more. Requests continue one of a few texts that differ from position 100 on, so that
they share prefixes.
"""

from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings

from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import Detokenizer
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.costs import PromptBudget, StepCosts
from specdec.scheduling.scheduler import Scheduler
from specdec.sizes import BLOCK_SIZE, EngineSizes

K = 3
MAX_MODEL_LEN = 300
MAX_AHEAD = 2


def token(text, position):
    return position % 91 if position < 100 else (position * 7 + text) % 97


class Device:
    """What both caches hold, by slot, and how far each request really is."""

    def __init__(self):
        self.target = {}
        self.draft = {}
        self.garbage = 0
        self.tables = {}
        self.lengths = {}
        self.texts = {}

    def start(self, request, text):
        self.tables[request.number] = list(request.blocks)
        self.lengths[request.number] = request.num_valid  # found in the cache
        self.texts[request.number] = text

    def slot(self, request, position):
        table = self.tables[request.number]
        block = table[position // BLOCK_SIZE] if position // BLOCK_SIZE < len(table) else None
        return None if block is None else (block, position % BLOCK_SIZE)

    def write(self, cache, request, position, is_true, num_after):
        slot = self.slot(request, position)
        if position >= MAX_MODEL_LEN or slot is None:
            return
        self.garbage += 1
        cache[slot] = (
            Device.value(self.texts[request.number], position, num_after)
            if is_true
            else self.garbage
        )

    def check(self, request):
        """Everything before the request's next row is true; of the draft's, where it drafts."""
        for position in range(self.lengths[request.number]):
            for cache, num_after in [(self.target, 0)] + [(self.draft, 1)] * (
                request.num_speculative_tokens > 0
            ):
                expected = Device.value(self.texts[request.number], position, num_after)
                assert cache.get(self.slot(request, position)) == expected, (
                    request.number,
                    position,
                    num_after,
                )

    @staticmethod
    def value(text, position, num_after):
        """Its position, and its text if it depends on a token in which the texts differ."""
        return position, text if position + num_after >= 100 else 0

    def prompts(self, work):
        for request, part in zip(work.prompts, work.parts, strict=True):
            assert self.lengths[request.number] == part.start
            self.check(request)
            for position in range(part.start, part.start + part.length):
                self.write(self.target, request, position, True, 0)
                self.write(self.draft, request, position, True, 1)
            self.lengths[request.number] = part.start + part.length
        return [int(part.samples) for part in work.parts]

    def verified(self, work, accepted):
        found = []
        for request, wanted in zip(work.verifying, accepted, strict=False):
            self.check(request)
            base = self.lengths[request.number]
            own = request.num_speculative_tokens
            last = min(own, MAX_MODEL_LEN - 1 - base)
            held = min(wanted, last)
            for i in range(last + 1):
                self.write(self.target, request, base + i, i <= held, 0)
                if work.shape.nodes > 0 or work.parts:
                    self.write(self.draft, request, base + i, i <= held, 1)
            for i in range(1, K if work.shape.nodes > 0 or work.parts else 1):
                self.write(self.draft, request, base + held + i, False, 1)
            self.lengths[request.number] = base + held + 1
            found.append(held + 1)
        return found


class World:
    """A scheduler, the device under it, and the steps between them."""

    def __init__(self, num_blocks, num_rows, budget, costs=None):
        sizes = EngineSizes(
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=num_blocks,
            num_speculative_tokens=K,
        )
        prompt_budget = None if costs is None else PromptBudget(costs=costs, slowdown=1.5)
        self.scheduler = Scheduler(BlockPool(num_blocks), sizes, True, prompt_budget)
        self.device = Device()
        self.requests = []
        self.texts = {}
        self.in_flight = deque()

    def add(self, text, num_prompt_tokens, max_tokens, k, priority, n):
        name = str(len(self.requests))
        for _ in range(n):
            self._add_sample(name, text, num_prompt_tokens, max_tokens, k, priority)

    def _add_sample(self, name, text, num_prompt_tokens, max_tokens, k, priority):
        request = Request(
            request_id=name,
            prompt=None,
            prompt_token_ids=[token(text, i) for i in range(num_prompt_tokens)],
            params=SamplingParams(temperature=0.0),
            rules=FinishRules(max_tokens=min(max_tokens, MAX_MODEL_LEN - num_prompt_tokens)),
            detokenizer=Detokenizer(None),
            stats=RequestStats(),
            priority=priority,
            number=len(self.requests),
            num_speculative_tokens=k,
        )
        if self.scheduler.blocks.needed(request) <= self.scheduler.pool.num_blocks:
            self.requests.append(request)
            self.texts[request.number] = text
            self.scheduler.add(request)

    def launch(self, accepted):
        """Schedule and run; False where nothing could be launched."""
        running = [each for each in self.scheduler.running if not each.is_ending]
        plan = self.scheduler.schedule()
        for request in plan.admitted:
            self.device.start(request, self.texts[request.number])
        by_row = {request.state_row: request for request in self.requests if request.state_row >= 0}
        for row, place, block in plan.grown:
            table = self.device.tables[by_row[row].number]
            assert place == len(table)
            table.append(block)
        work = plan.work
        if work is None:
            return False
        assert 0 < len(work.requests) <= self.scheduler.sizes.max_num_seqs
        kept = {each for each in running if each.state_row >= 0}
        assert kept == set(work.verifying), "a request that runs waits"
        waiting = [each for each in self.scheduler.prefilling if each.finish is None]
        assert work.parts or not waiting, "no prompt advances"
        ends = [part.ends_prompt for part in work.parts]
        assert all(ends[:-1]), "a prompt goes on before the last slot"
        counts = self.device.verified(work, accepted) + self.device.prompts(work)
        self.in_flight.append((work, counts))
        self.check()
        return True

    def finish_step(self):
        work, counts = self.in_flight.popleft()
        for request, count in zip(work.requests, counts, strict=True):
            if request.finish is None and count:
                text = self.texts[request.number]
                first = request.num_tokens
                request.append([token(text, first + i) for i in range(count)], 0.0)
        self.scheduler.finish_step(work)
        self.check()

    def abort(self, index):
        request = self.requests[index % len(self.requests)]
        if request.finish is None:
            request.end("abort")
            self.scheduler.drop(request)

    def check(self):
        """No two requests share a state row; every block that none of them has is free."""
        placed = [request for request in self.requests if request.state_row >= 0]
        assert len({request.state_row for request in placed}) == len(placed)
        held = {block for request in placed for block in request.blocks}
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_blocks - len(held)

    def step(self, accepted, num_ahead):
        """Like the engine: launch a step, then finish the oldest if too many are in flight."""
        is_launched = self.launch(accepted)
        if self.in_flight and (len(self.in_flight) > num_ahead or not is_launched):
            self.finish_step()

    def finish(self, num_ahead):
        """No more arrive: all end within a bounded number of steps and release everything."""
        for _ in range(2000):
            self.step([1] * 4, num_ahead)
            if not self.scheduler.has_unfinished:
                break
        assert all(request.finish is not None for request in self.requests)
        assert not self.in_flight
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert sorted(self.scheduler._free_rows) == list(range(self.scheduler.sizes.num_state_rows))


REQUEST = st.tuples(
    st.integers(0, 2),
    st.integers(1, 220),
    st.integers(1, 90),
    st.sampled_from([0, 1, K, K]),
    st.integers(0, 1),
    st.sampled_from([1, 1, 1, 4]),
)
COSTS = StepCosts(rounds=((4, 1.0), (16, 1.2)), mixed=((64, 1.3), (80, 1.6)))
ACCEPTED = st.lists(st.integers(0, K), min_size=4, max_size=4)
EVENT = st.one_of(
    st.tuples(st.just("add"), REQUEST),
    st.tuples(st.just("steps"), st.lists(ACCEPTED, min_size=1, max_size=12)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(EVENT, min_size=4, max_size=30),
    num_blocks=st.integers(4, 9),
    num_rows=st.integers(1, 4),
    budget=st.sampled_from([1, 5, 40, 400]),
    num_ahead=st.integers(0, MAX_AHEAD),
    costs=st.sampled_from([None, COSTS]),
)
def test_no_step_reads_an_entry_that_is_not_its_own(
    events, num_blocks, num_rows, budget, num_ahead, costs
):
    world = World(num_blocks, num_rows, budget, costs)
    for kind, value in events:
        if kind == "add":
            world.add(*value)
        elif kind == "abort" and world.requests:
            world.abort(value)
        elif kind == "steps":
            for accepted in value:
                world.step(accepted, num_ahead)
    world.finish(num_ahead)
