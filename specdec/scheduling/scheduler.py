"""Which request computes what in the next step. Host only, no tensors.

A step is a chunk of prompts or a round of everything that runs; the two alternate while both have work, so that nobody
who runs waits longer than one chunk. Lower priorities go first, then samples of the caller's request that has fewer of
them running, then earlier arrivals. Blocks are taken as a request grows; when none is left, the last in that order goes
back to wait, and computes its tokens again later.

Steps are launched before the results of the ones before are known, so what a request needs is bounded by what is in
flight; its row and blocks are given up only when nothing in flight can write them.
"""

from bisect import insort
from collections import Counter

from specdec.requests.request import Request
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.prefix_keys import NO_PREFIX, block_key, num_whole_blocks
from specdec.scheduling.work import AnyWork, Chunk, Plan, PromptPart, Round, Work
from specdec.sizes import BLOCK_SIZE, EngineSizes


class Scheduler:
    """use_prefix_cache: take blocks that hold the beginning of a prompt already, and let others find ours."""

    def __init__(self, pool: BlockPool, sizes: EngineSizes, use_prefix_cache: bool = False) -> None:
        self.pool, self.sizes, self.use_prefix_cache = pool, sizes, use_prefix_cache
        self.waiting: list[Request] = []  # in order of priority and arrival
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.num_in_flight = 0  # steps
        self._free_rows = list(range(sizes.max_num_seqs - 1, -1, -1))
        self._grown: list[tuple[int, int, int]] = []
        self._was_chunk = False

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=lambda each: each.order)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still needs a step, or the result of one."""
        return bool(self.waiting or self.prefilling or self.running)

    def blocks_needed(self, request: Request) -> int:
        """Blocks for a request's longest possible context and the drafts of its last round."""
        return -(-self._max_slots(request) // BLOCK_SIZE)

    def schedule(self) -> Plan:
        """Decide on the next step and take it as launched."""
        self._grown = []
        admitted = self._admit()
        ranks = self._ranks()
        ready = sorted((each for each in self.running if not each.is_ending), key=ranks.__getitem__)
        prompts = sorted(
            (each for each in self.prefilling if each.finish is None), key=ranks.__getitem__
        )
        work: Work | None = None
        if prompts and not (self._was_chunk and ready):
            work = self._chunk(prompts)
        elif ready:
            work = self._round(ready, ranks)
            # who was sent back to wait has no row any more
            admitted = [request for request in admitted if request.state_row >= 0]
        if work is not None:
            self._was_chunk = isinstance(work, Chunk)
            self.num_in_flight += 1
        return Plan(admitted=admitted, grown=self._grown, work=work)

    def reserve(self, request: Request) -> list[tuple[int, int, int]]:
        """Take all blocks that a running request can ever need; returns what the state has to learn."""
        return self._take_blocks(request, self.blocks_needed(request) - len(request.blocks))

    def finish_step(self, work: Work) -> None:
        """The results of a step in flight are taken, and its tokens appended."""
        self.num_in_flight -= 1
        for b, request in enumerate(work.requests):
            request.num_in_flight -= 1
            request.least_pending -= _least_tokens(work, b)
            request.most_pending -= _most_tokens(work, b)
            if request.finish is None or request.finish.reason in ("stop", "length"):
                self._publish_blocks(request, work, b)
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Give up what an ended request holds, as soon as nothing in flight can write it."""
        if request.finish is None or request.num_in_flight > 0:
            return
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        if request.finish.reason == "error":
            # what it computed may be what was wrong
            self.pool.unpublish(request.blocks)
        self._release(request)

    # admission

    def _admit(self) -> list[Request]:
        """Give rows and blocks to those who wait, in turn, up to the first that does not fit."""
        admitted: list[Request] = []
        num_rows = Counter(request.request_id for request in self.prefilling + self.running)
        while self.waiting and self._free_rows and self._try_admit(request := self._next(num_rows)):
            self.waiting.remove(request)
            self.prefilling.append(request)
            admitted.append(request)
            num_rows[request.request_id] += 1
        return admitted

    def _next(self, num_rows: Counter[str]) -> Request:
        """The first in order among those whose request has the fewest rows, so that many samples hold up no other."""
        best = self.waiting[0]
        for request in self.waiting:
            if num_rows[best.request_id] == 0 or request.priority > best.priority:
                break
            if num_rows[request.request_id] < num_rows[best.request_id]:
                best = request
        return best

    def _ranks(self) -> dict[Request, tuple[int, int, int]]:
        """The order of all that have rows: the second sample of a request comes after the first of every other."""
        ranks, num_before = {}, Counter[str]()
        for request in sorted(self.prefilling + self.running, key=lambda each: each.order):
            ranks[request] = (request.priority, num_before[request.request_id], request.number)
            num_before[request.request_id] += 1
        return ranks

    def _try_admit(self, request: Request) -> bool:
        """Whether there was room for a request's context and its first round, beside a block for each that may grow."""
        context = request.tokens(0, request.num_tokens)
        found = self._cached_blocks(request, context)
        self.pool.hold(found)
        num_new = self._num_blocks(request, len(context)) - len(found)
        num_growing = sum(
            len(each.blocks) < self.blocks_needed(each) for each in self.prefilling + self.running
        )
        if num_new + num_growing > self.pool.num_free:
            self.pool.free(found)
            return False
        request.state_row, request.context = self._free_rows.pop(), context
        request.blocks = found + self.pool.allocate(num_new)
        request.num_prefilled = request.num_valid = len(found) * BLOCK_SIZE
        request.num_published = len(found)
        request.stats.num_cached_tokens += request.num_prefilled
        return True

    def _cached_blocks(self, request: Request, context: list[int]) -> list[int]:
        """Blocks that hold the beginning of a context. Logprobs of a prompt need all of it computed."""
        if not self.use_prefix_cache or (
            request.params.prompt_logprobs is not None and not request.token_ids
        ):
            return []
        count = num_whole_blocks(
            len(context) - bool(request.token_ids)
        )  # a row is left to be computed
        self._make_keys(request, count)
        return self.pool.find(request.keys[:count])

    def _num_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks up to a round that stands behind so many tokens: its rows, and those of the drafts for the next."""
        return -(
            -min(num_tokens + 2 * request.num_speculative_tokens, self._max_slots(request))
            // BLOCK_SIZE
        )

    def _max_slots(self, request: Request) -> int:
        most = (
            len(request.prompt_token_ids)
            + request.rules.max_tokens
            + request.num_speculative_tokens
        )
        return min(most, self.sizes.max_model_len)

    # steps

    def _chunk(self, prompts: list[Request]) -> Chunk:
        """Pack prompts in order, up to the budget."""
        budget, requests, parts = self.sizes.max_num_batched_tokens, [], []
        for request in prompts:
            length = min(
                len(request.context) - bool(request.token_ids) - request.num_prefilled, budget
            )
            if length == 0:
                break
            budget -= length
            parts.append(_part(request, length))
            requests.append(request)
            request.num_prefilled += length
            if parts[-1].ends_prompt:
                self.prefilling.remove(request)
                self.running.append(request)
        return self._mark_launched(Chunk(requests=requests, parts=parts))

    def _round(
        self, ready: list[Request], ranks: dict[Request, tuple[int, int, int]]
    ) -> Round | None:
        """All that are ready, in order of rank.

        None where blocks are short and a step in flight may still free some, or where all went back to wait after
        prompts that go before them.
        """
        kept = []
        for request in ready:
            while request.state_row >= 0 and not self._grow(request):
                if self.num_in_flight:
                    return None
                self._preempt(max(self.prefilling + self.running, key=ranks.__getitem__))
            if request.state_row >= 0:
                kept.append(request)
        if not kept:
            return None
        drafts = any(request.num_speculative_tokens for request in kept)
        query_len = self.sizes.num_speculative_tokens + 1 if drafts else 1
        return self._mark_launched(Round(requests=kept, query_len=query_len))

    def _grow(self, request: Request) -> bool:
        """Whether a request has blocks for its next round, wherever the ones in flight leave it."""
        count = self._num_blocks(request, request.num_tokens + request.most_pending) - len(
            request.blocks
        )
        if count > self.pool.num_free:
            return False
        if count > 0:
            self._grown += self._take_blocks(request, count)
        return True

    def _take_blocks(self, request: Request, count: int) -> list[tuple[int, int, int]]:
        first = len(request.blocks)
        request.blocks += self.pool.allocate(count)
        return [
            (request.state_row, i, request.blocks[i]) for i in range(first, len(request.blocks))
        ]

    def _preempt(self, request: Request) -> None:
        """Back to wait; prompt and tokens so far are computed again. Nobody behind those who grew has grown."""
        (self.running if request in self.running else self.prefilling).remove(request)
        self._release(request)
        request.stats.num_preemptions += 1
        self.add(request)

    def _release(self, request: Request) -> None:
        if request.state_row >= 0:
            self.pool.free(request.blocks)
            self._free_rows.append(request.state_row)
        request.state_row, request.blocks, request.context = -1, [], ()
        request.num_prefilled = request.num_valid = request.num_published = 0

    def _mark_launched(self, work: AnyWork) -> AnyWork:
        for b, request in enumerate(work.requests):
            request.num_in_flight += 1
            request.least_pending += _least_tokens(work, b)
            request.most_pending += _most_tokens(work, b)
        return work

    # what others may find

    def _publish_blocks(self, request: Request, work: Work, b: int) -> None:
        """Name the blocks that are whole now. Rounds of a request that never drafts may leave the draft's cache out."""
        if isinstance(work, Chunk):
            request.num_valid = work.parts[b].start + work.parts[b].length
        elif request.num_speculative_tokens or not self.sizes.num_speculative_tokens:
            request.num_valid = request.num_tokens - 1
        if not self.use_prefix_cache:
            return
        count = min(request.num_valid // BLOCK_SIZE, num_whole_blocks(request.num_tokens))
        self._make_keys(request, count)
        for i in range(request.num_published, count):
            self.pool.publish(request.blocks[i], request.keys[i])
        request.num_published = max(request.num_published, count)

    def _make_keys(self, request: Request, count: int) -> None:
        for i in range(len(request.keys), count):
            before = request.keys[i - 1] if i else NO_PREFIX
            request.keys.append(
                block_key(before, request.tokens(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE + 1))
            )


def _part(request: Request, length: int) -> PromptPart:
    is_resumed = bool(
        request.token_ids
    )  # a preemption came between, and logprobs of the prompt are there
    return PromptPart(
        state_row=request.state_row,
        prompt=request.context,
        start=request.num_prefilled,
        length=length,
        blocks=request.blocks,
        num_logprobs=None if is_resumed else request.params.prompt_logprobs,
        is_resumed=is_resumed,
    )


def _least_tokens(work: Work, b: int) -> bool:
    return isinstance(work, Round) or work.parts[b].samples


def _most_tokens(work: Work, b: int) -> int:
    if isinstance(work, Chunk):
        return int(work.parts[b].samples)
    return work.requests[b].num_speculative_tokens + 1 if work.query_len > 1 else 1
