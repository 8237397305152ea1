"""Which request computes what in the next step. Host only, no tensors.

In a step all running requests verify, and rows of prompts ride along: as many as keep it within a
multiple of its time without them (costs.py), and all that fit while nothing runs. The order is
by priority, then samples of the caller's request with fewer samples running, then arrival. Requests
take blocks as they grow; when none is left, the last in that order is preempted and later computes
its tokens again.

Steps are launched before the results of earlier ones are known, so blocks are reserved for the most
tokens that the steps in flight can bring, and a request's row and blocks are released only when no
step in flight can write them.
"""

from array import array
from bisect import insort
from collections import Counter
from dataclasses import replace

from specdec.requests.request import Request
from specdec.scheduling.block_pool import BlockPool, RequestBlocks
from specdec.scheduling.costs import PromptBudget
from specdec.scheduling.planner import NextRound, Planner
from specdec.scheduling.prompts import PromptRows, num_left
from specdec.scheduling.work import Plan, PromptPart, Work, work_of
from specdec.sizes import BLOCK_SIZE, IDLE, PLAIN, EngineSizes

FEW = 4  # requests, of which each has a large share of a step


class Scheduler:
    """use_prefix_cache: start prompts from published blocks, and publish blocks that are whole.

    budget: how many rows of prompts ride in a step; None: max_num_batched_tokens in each.
    planner: how many rows verify, and how many levels the draft runs; None: K drafts for each.
    """

    def __init__(
        self,
        pool: BlockPool,
        sizes: EngineSizes,
        use_prefix_cache: bool = False,
        budget: PromptBudget | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.pool = pool
        self.sizes = sizes
        self.planner = planner
        self._live = PLAIN  # drafts that the latest step leaves
        self.blocks = RequestBlocks(pool, sizes, use_prefix_cache)
        self.prompts = PromptRows(sizes.max_num_batched_tokens, budget)
        self.waiting: list[Request] = []  # in order of priority and arrival
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.num_in_flight = 0  # steps
        self._free_rows = list(range(sizes.num_state_rows - 1, -1, -1))
        self._grown: list[tuple[int, int, int]] = []

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda each: each.order)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self._admitted)

    @property
    def may_lack_work(self) -> bool:
        """Whether steps in flight may bring the last tokens of all requests, or of one among few.

        If they do, a step launched now would do nothing, and a new request would wait behind it.
        Requests that are sure to end are not counted: no further step takes them, and new requests
        may have their places.
        """
        if self.prefilling:
            return False
        running = [request for request in self.running if not request.is_ending]
        has_places = len(running) < self.sizes.max_num_seqs
        if not running or (self.waiting and has_places):
            return False
        may_end = (request.may_be_ending for request in running)
        return any(may_end) if len(running) <= FEW else all(may_end)

    @property
    def _admitted(self) -> list[Request]:
        return self.prefilling + self.running

    def schedule(self) -> Plan:
        """Decide on the next step and count it as launched."""
        self._grown = []
        admitted = self._admit()
        self.prompts.note_arrivals(admitted)
        ranked = self._ranked()
        work = self._work(ranked)
        # a step may have preempted some of them
        admitted = [request for request in admitted if request.state_row >= 0]
        if work is not None:
            self._count_in_flight(work, 1)
        return Plan(admitted=admitted, grown=self._grown, work=work)

    def finish_step(self, work: Work) -> None:
        """Call when a step's results have been read and its tokens appended."""
        self._count_in_flight(work, -1)
        parts = [*[None] * len(work.verifying), *work.parts]
        for request, part in zip(work.requests, parts, strict=True):
            if request.finish is None or request.finish.reason in ("stop", "length"):
                self.blocks.publish(request, part)
            if request.finish is not None:
                self.drop(request)

    def drop(self, request: Request) -> None:
        """Release what an ended request holds, once no step in flight can write it."""
        if request.num_in_flight > 0:
            return
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        if request.has_faulty_blocks:
            self.pool.unpublish(request.blocks)
        self._release(request)

    # admission

    def _admit(self) -> list[Request]:
        """Give rows and blocks to waiting requests, in order, up to the first that does not fit."""
        admitted: list[Request] = []
        if not self.waiting:
            return admitted
        num_places = self.sizes.max_num_seqs - sum(not each.is_ending for each in self._admitted)
        num_rows = Counter(request.request_id for request in self._admitted)
        while self.waiting and self._free_rows and len(admitted) < num_places:
            request = self._next(num_rows)
            if not self._try_admit(request):
                break
            self.waiting.remove(request)
            self.prefilling.append(request)
            admitted.append(request)
            num_rows[request.request_id] += 1
        return admitted

    def _next(self, num_rows: Counter[str]) -> Request:
        """Pick a sample of the request with the fewest rows: many samples delay no other."""
        best = self.waiting[0]
        for request in self.waiting:
            if num_rows[best.request_id] == 0 or request.priority > best.priority:
                break
            if num_rows[request.request_id] < num_rows[best.request_id]:
                best = request
        return best

    def _ranked(self) -> list[Request]:
        """Admitted samples in order: a request's second one ranks after every other's first."""
        ordered = sorted(self._admitted, key=lambda each: each.order)
        if len({request.request_id for request in ordered}) == len(ordered):
            return ordered  # no request has two samples
        ranks = {}
        num_before = Counter[str]()
        for request in ordered:
            ranks[request] = (request.priority, num_before[request.request_id], request.number)
            num_before[request.request_id] += 1
        return sorted(ranks, key=ranks.__getitem__)

    def _try_admit(self, request: Request) -> bool:
        """Admit a request if its first round fits, with a block left for each that may grow."""
        context = request.tokens(0, request.num_tokens)
        found = self.blocks.cached(request, context)
        self.pool.hold(found)
        num_new = self.blocks.for_round(request, len(context)) - len(found)
        if not self._has_free(num_new):
            self.pool.free(found)
            return False
        request.state_row = self._free_rows.pop()
        request.context = array("q", context)
        request.blocks = found + self.pool.allocate(num_new)
        request.num_prefilled = request.num_valid = len(found) * BLOCK_SIZE
        request.num_published = len(found)
        if request.stats.num_preemptions == 0:
            request.stats.num_cached_tokens = request.num_prefilled
        return True

    def _has_free(self, num_new: int) -> bool:
        """Blocks for a request that is admitted, and one for each other that may grow."""
        left, admitted = self.pool.num_free - num_new, self._admitted
        if left >= len(admitted):
            return True
        return left >= sum(len(each.blocks) < self.blocks.needed(each) for each in admitted)

    # steps

    def _work(self, ranked: list[Request]) -> Work | None:
        """All that run, and the next rows of prompts. ranked: all admitted requests."""
        verifying = self._verifying(ranked)
        if verifying is None:
            return None
        prefilling = set(self.prefilling)
        prompting = [each for each in ranked if each in prefilling and each.finish is None]
        if not verifying and not prompting:
            return None
        work = self._round(verifying, prompting)
        if prompting:
            self._add_parts(work, prompting)
        if work.next_shape.is_wide:  # by all for whom it drafts
            work = replace(work, next_shape=self.sizes.shape_of(len(work.requests), is_wide=True))
        self._live = work.next_shape if work.next_shape.nodes else PLAIN
        return work

    def _round(self, verifying: list[Request], prompting: list[Request]) -> Work:
        drafting = [each for each in verifying if each.num_speculative_tokens > 0]
        if self.planner is not None:
            return self._planned(self.planner, verifying, drafting, prompting)
        shape = self.sizes.shape_of(len(verifying))
        verified = shape if drafting else PLAIN
        proposed = shape if drafting or prompting else IDLE
        return work_of(verifying, verified, proposed)

    def _planned(
        self,
        planner: Planner,
        verifying: list[Request],
        drafting: list[Request],
        prompting: list[Request],
    ) -> Work:
        if not drafting and not any(each.num_speculative_tokens for each in prompting):
            return work_of(verifying, PLAIN, PLAIN if prompting else IDLE)
        coming = self._coming(verifying, drafting, prompting)
        plan = planner.plan(coming)
        live = coming.live if drafting else PLAIN
        if live.is_wide:
            return work_of(verifying, live, plan.next_shape)
        num_rows = max(plan.num_rows if live != PLAIN else 0, len(verifying))
        if not verifying or (plan.next_shape == PLAIN and num_rows == len(verifying)):
            return work_of(verifying, PLAIN, plan.next_shape)
        work = work_of(verifying, self.sizes.shape_of(len(verifying)), plan.next_shape)
        return replace(work, shared_rows=num_rows, num_live=live.levels)

    def _coming(
        self, verifying: list[Request], drafting: list[Request], prompting: list[Request]
    ) -> NextRound:
        """Describe the next round; where no request verifies yet, that of those that soon will."""
        sizes, live = self.sizes, self._live
        num_requests = len(verifying) or min(len(prompting), sizes.max_num_seqs)
        is_wide = len(verifying) + len(prompting) <= sizes.max_tree_requests
        num_prompt_rows = 0
        if verifying:
            num_prompt_rows = self.prompts.fitting(len(verifying), verifying, prompting)
        else:  # as the rounds before it, so that what was planned for these serves
            drafting = [each for each in prompting if each.num_speculative_tokens > 0]
        return NextRound(
            num_requests=num_requests,
            num_drafting=len(drafting) or num_requests,
            live=sizes.shape_of(num_requests, is_wide=True) if live.is_wide else live,
            num_keys=sum(each.num_tokens for each in verifying),
            num_prompt_rows=num_prompt_rows,
            tree=sizes.shape_of(num_requests, is_wide=True) if is_wide else None,
            num_sampled=sum(each.params.temperature > 0 for each in drafting),
        )

    def _add_parts(self, work: Work, prompting: list[Request]) -> None:
        """Pack prompts in order, up to the budget; only the last of them may go on."""
        rows_left = self.prompts.fitting(work.num_verify_rows, work.verifying, prompting)
        for request in prompting:
            length = min(num_left(request), rows_left)
            if length == 0:
                break
            rows_left -= length
            part = _part(request, length)
            work.parts.append(part)
            work.prompts.append(request)
            request.num_prefilled += length
            if part.ends_prompt:
                self.prefilling.remove(request)
                self.running.append(request)

    def _verifying(self, ranked: list[Request]) -> list[Request] | None:
        """List the running requests, each with blocks for the step.

        Returns None if blocks are short and a step in flight may still free some.
        """
        running = set(self.running)
        kept = []
        for request in [each for each in ranked if each in running and not each.is_ending]:
            while request.state_row >= 0 and not self._grow(request):
                if self.num_in_flight:
                    return None
                self._preempt(next(each for each in reversed(ranked) if each.state_row >= 0))
            if request.state_row >= 0:
                kept.append(request)
        return kept

    def _grow(self, request: Request) -> bool:
        """Give a request the blocks of its next round, wherever the steps in flight leave it."""
        most_tokens = request.num_tokens + request.most_pending
        num_slots = most_tokens + self.blocks.num_ahead(request)
        if num_slots <= len(request.blocks) * BLOCK_SIZE:
            return True
        count = self.blocks.for_round(request, most_tokens) - len(request.blocks)
        if count > self.pool.num_free:
            return False
        if count > 0:
            self._grown += self.blocks.take(request, count)
        return True

    def _preempt(self, request: Request) -> None:
        """Requeue a request. Requests grow in order, so this one has not grown."""
        (self.running if request in self.running else self.prefilling).remove(request)
        self._release(request)
        request.stats.num_preemptions += 1
        self.add(request)

    def _release(self, request: Request) -> None:
        if request.state_row >= 0:
            self.pool.free(request.blocks)
            self._free_rows.append(request.state_row)
        request.state_row = -1
        request.blocks = []
        request.context = ()
        request.num_prefilled = request.num_valid = request.num_published = 0

    def _count_in_flight(self, work: Work, sign: int) -> None:
        """sign: 1 when a step is launched, -1 when it is finished."""
        self.num_in_flight += sign
        for request, (least, most) in zip(work.requests, work.token_bounds, strict=True):
            request.num_in_flight += sign
            request.least_pending += sign * least
            request.most_pending += sign * most


def _part(request: Request, length: int) -> PromptPart:
    is_resumed = bool(request.token_ids)  # and then the prompt's logprobs have been returned
    return PromptPart(
        state_row=request.state_row,
        prompt=request.context,
        start=request.num_prefilled,
        length=length,
        blocks=request.blocks,
        num_logprobs=None if is_resumed else request.params.num_prompt_logprobs,
        is_resumed=is_resumed,
    )
