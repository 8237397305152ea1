"""Requests in, tokens out: the engine steps until every request has reached its end.

A step is a prefill chunk or a round (round.py). This file is the host's side: it launches steps, up to
`num_steps_ahead` of them before the results of the ones before are there, and says what their tokens mean for each
request. What a step computed for a request that had ended by then counts nowhere.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphs.counters import summary
from specdec.kernels.best_token import NO_TOKEN
from specdec.requests.intake import Intake, NewRequest
from specdec.requests.output import Logprob
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request
from specdec.requests.row_start import RowStart
from specdec.requests.sampling_flags import SamplingFlags
from specdec.requests.stats import RoundRecord
from specdec.runner import Runner
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.work import Chunk, Plan, Round, Work
from specdec.stepping.logprobs import StepLogprobs
from specdec.stepping.results import PendingResult, RoundResult

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that is launched, and where its results arrive."""

    work: Work
    result: PendingResult


class Engine:
    """For one thread at a time.

    num_steps_ahead: 1 lets the host prepare a step while the device runs another; 0 takes results at once.
    """

    def __init__(
        self,
        runner: Runner,
        intake: Intake,
        *,
        use_prefix_cache: bool = False,
        num_steps_ahead: int = 0,
    ) -> None:
        self.runner, self.intake, self.num_steps_ahead = runner, intake, num_steps_ahead
        self._use_prefix_cache = use_prefix_cache
        self.scheduler = self._new_scheduler()
        self._in_flight: deque[InFlight] = deque()
        self._unfinished: dict[str, list[Request]] = {}  # by request id
        self.owner: threading.Thread | None = None  # the only one that may call, if there is one

    def add_requests(
        self, batch: Iterable[NewRequest | tuple[str | Sequence[int], SamplingParams]]
    ) -> list[Request]:
        """Check and queue requests. ValueError says what is wrong with one; none is queued then.

        Returns the first sample of each; it knows the others.
        """
        self.check_caller()
        asked = [
            each if isinstance(each, NewRequest) else NewRequest(prompt=each[0], params=each[1])
            for each in batch
        ]
        added = {samples[0].request_id: samples for samples in map(self.intake.samples, asked)}
        taken = [name for name in added if name in self._unfinished]
        if taken or len(added) < len(asked):
            raise ValueError(
                f"request_id {taken or 'given twice'}: give each request that runs an id of its own"
            )
        for samples in added.values():
            self._check_fits(samples[0])
        self._unfinished |= added
        for sample in (sample for samples in added.values() for sample in samples):
            self.scheduler.add(sample)
        return [samples[0] for samples in added.values()]

    def check_caller(self) -> None:
        """RuntimeError where the engine belongs to another thread, whose steps a call would disturb."""
        if self.owner is not None and threading.current_thread() is not self.owner:
            raise RuntimeError(
                "this engine belongs to an AsyncLLM, whose thread alone may call it: use generate, chat and abort of "
                "the AsyncLLM, not of its llm or engine"
            )

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not reached its end."""
        return bool(self._unfinished)

    def step(self) -> list[Request]:
        """Launch what is next and take the results of what came before; returns the requests that changed.

        What breaks it off (Ctrl-C, an error of the device) ends all requests; others may be added behind it.
        """
        self.check_caller()
        try:
            return self._step()
        except BaseException as error:
            self._end_all_after(error)
            raise

    def _step(self) -> list[Request]:
        plan = self.scheduler.schedule()
        self._prepare(plan)
        failed = [] if plan.work is None else self._launch(plan.work)
        is_ahead = len(self._in_flight) > self.num_steps_ahead
        if self._in_flight and (is_ahead or plan.work is None):
            return failed + self._take(self._in_flight.popleft())
        return failed

    def abort(self, request_id: str) -> list[Request]:
        """End a request wherever it stands; returns its samples that had not ended, none if the id is unknown."""
        self.check_caller()
        running = [
            sample for sample in self._unfinished.get(request_id, []) if sample.finish is None
        ]
        for sample in running:
            sample.end("abort")
        self._release_ended(running)
        return running

    def abort_all(self) -> list[Request]:
        """End all requests."""
        self.check_caller()
        return [
            sample for request_id in list(self._unfinished) for sample in self.abort(request_id)
        ]

    def drain(self) -> None:
        """Take the results of all that is in flight, so that what ended requests held is free."""
        self.check_caller()
        while self._in_flight:
            self._take(self._in_flight.popleft())

    def _new_scheduler(self) -> Scheduler:
        sizes = self.runner.sizes
        return Scheduler(BlockPool(sizes.num_kv_blocks), sizes, self._use_prefix_cache)

    def _end_all_after(self, error: BaseException) -> None:
        """End all requests: in the middle of a step nobody knows who holds which rows and blocks, or what they hold."""
        for request in (sample for samples in self._unfinished.values() for sample in samples):
            if request.finish is None:
                request.end("error", f"a step was broken off: {type(error).__name__}: {error}")
        self._unfinished.clear()
        self._in_flight.clear()
        self.scheduler = self._new_scheduler()

    # launch

    def _prepare(self, plan: Plan) -> None:
        for request in plan.admitted:
            self.runner.start(request.state_row, self._row_start(request))
        if plan.grown:  # seldom: once in 64 tokens of a request
            self.runner.grow(plan.grown)

    def _row_start(self, request: Request) -> RowStart:
        rules = request.rules
        return RowStart(
            blocks=request.blocks,
            num_draft_tokens=request.num_speculative_tokens,
            min_position=len(request.prompt_token_ids) + rules.min_tokens,
            stop_ids=sorted({*rules.eos_token_ids, *rules.stop_token_ids})
            if rules.min_tokens
            else (),
            sampling=request.sampling,
            generated=request.token_ids[:-1],
        )

    def _launch(self, work: Work) -> list[Request]:
        """Start a step; returns its requests if the device has no memory for it, which ends them and no others."""
        try:
            result = self._run_chunk(work) if isinstance(work, Chunk) else self._run_round(work)
        except torch.OutOfMemoryError as error:
            return self._fail(work, error)
        self._in_flight.append(InFlight(work, result))
        return []

    def _run_chunk(self, chunk: Chunk) -> PendingResult:
        ended = zip(chunk.requests, chunk.parts, strict=True)
        flags = SamplingFlags.of_all(
            request.params.flags for request, part in ended if part.ends_prompt
        )
        return self.runner.run_chunk(chunk.parts, flags)

    def _run_round(self, work: Round) -> PendingResult:
        bound = max(request.num_tokens + request.most_pending for request in work.requests) - 1
        flags = SamplingFlags.of_all(request.params.flags for request in work.requests)
        return self.runner.run_round(
            [request.state_row for request in work.requests], bound, flags, work.query_len
        )

    def _fail(self, work: Work, error: torch.OutOfMemoryError) -> list[Request]:
        kind = "prefill chunk" if isinstance(work, Chunk) else "round"
        message = (
            f"out of memory in a {kind} of {len(work.requests)} requests: lower gpu_memory_utilization, max_num_seqs "
            f"or max_num_batched_tokens ({error})"
        )
        logger.error(message)
        failed = [request for request in work.requests if request.finish is None]
        for request in failed:
            request.end("error", message)
        self.scheduler.finish_step(work)
        self._release_ended(failed)
        torch.cuda.empty_cache()
        return failed

    # results

    def _take(self, step: InFlight) -> list[Request]:
        result = step.result.read()
        before = [request for request in step.work.requests if request.finish is None]
        if isinstance(step.work, Chunk):
            changed = self._take_chunk(step.work, result)
        else:
            changed = self._take_round(step.work, result)
        self.scheduler.finish_step(step.work)
        self._release_ended([request for request in before if request.finish is not None])
        if not self._unfinished and logger.isEnabledFor(logging.DEBUG):
            logger.debug("graphs: %s", summary(self.runner.graphs.counters()))
        return changed

    def _take_chunk(self, chunk: Chunk, result: RoundResult) -> list[Request]:
        changed = []
        for b, (request, part) in enumerate(zip(chunk.requests, chunk.parts, strict=True)):
            if request.finish is not None:
                continue
            if part.num_logprobs is not None:
                self._take_prompt_logprobs(chunk, b, result)
            if part.samples:
                self._append(request, result.sampled_tokens[b][:1], result.logprobs, b)
                changed.append(request)
        return changed

    def _take_round(self, work: Round, result: RoundResult) -> list[Request]:
        changed = []
        for b, request in enumerate(work.requests):
            if request.finish is not None:
                continue
            num_accepted, tokens = result.num_accepted[b], result.sampled_tokens[b]
            drafts = tuple(result.draft_tokens[b][: self._num_drafted(request)])
            request.record_round(RoundRecord(drafts, num_accepted, tokens[num_accepted]))
            self._append(request, tokens[: num_accepted + 1], result.logprobs, b * work.query_len)
            changed.append(request)
        return changed

    def _append(
        self, request: Request, tokens: list[int], logprobs: StepLogprobs | None, first: int
    ) -> None:
        """Give a request the tokens of a step, whose logprobs begin in row `first`; markers below 0 end it."""
        end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
        num_top = request.params.logprobs
        if num_top is not None and logprobs is not None:
            request.logprobs += [
                self._named(logprobs.row(first + i, tokens[i], num_top)) for i in range(end)
            ]
        request.append(tokens[:end], time.monotonic())
        if end == len(tokens) or request.finish is not None:
            return
        if tokens[end] == NO_TOKEN:
            request.end_without_candidates()
        else:
            place = f"position {len(request.token_ids)} of the output"
            request.end("error", f"the target's logits at {place} are not finite (NaN or infinity)")

    def _take_prompt_logprobs(self, chunk: Chunk, b: int, result: RoundResult) -> None:
        request, part, found = chunk.requests[b], chunk.parts[b], result.prompt_logprobs[b]
        if part.start == 0:
            request.prompt_logprobs = [None]
        following = part.prompt[part.start + 1 : part.start + part.length + 1]
        if found is not None:
            rows = (
                found.row(i, token, part.num_logprobs or 0) for i, token in enumerate(following)
            )
            request.prompt_logprobs += [self._named(row) for row in rows]

    def _named(self, row: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        tokenizer = self.intake.tokenizer
        return {
            token: Logprob(value, rank, tokenizer.decode([token]))
            for token, (value, rank) in row.items()
        }

    def _num_drafted(self, request: Request) -> int:
        """Drafts of this round: the rows behind the first that lie within the context."""
        return min(
            request.num_speculative_tokens, self.runner.sizes.max_model_len - request.num_tokens
        )

    def _release_ended(self, ended: Sequence[Request]) -> None:
        for request in ended:
            self.scheduler.drop(request)
            if request.is_finished:
                self._unfinished.pop(request.request_id, None)

    def _check_fits(self, request: Request) -> None:
        need, have = self.scheduler.blocks_needed(request), self.scheduler.pool.num_blocks
        if need > have:
            raise ValueError(
                f"the cache is too small for this request: prompt of {len(request.prompt_token_ids)} tokens and "
                f"max_tokens={request.rules.max_tokens} need {need} blocks of 64 tokens, num_kv_blocks={have}: "
                f"raise num_kv_blocks, or lower max_tokens"
            )
