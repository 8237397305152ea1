"""Requests in, tokens out: the engine steps until every request has reached its end.

In a step, running requests verify their drafts and parts of prompts are computed (step.py). This
file is the host's side: it launches steps, up to `num_steps_ahead` of them before the results of
earlier ones arrive, and gives each request its tokens. If a request has ended meanwhile, what a
step computed for it is dropped.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from graphs.counters import summary
from specdec.deliver import Deliveries
from specdec.feedback import Feedback, num_drafted
from specdec.guided.step_masks import StepMasks
from specdec.kernels.compilations import compilations
from specdec.requests.intake import Intake, NewRequest, Prompt
from specdec.requests.metrics import Metric, Totals
from specdec.requests.params import SamplingFlags, SamplingParams
from specdec.requests.request import Request
from specdec.rounds.results import PendingResult
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.costs import PromptBudget
from specdec.scheduling.planner import Planner
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.work import Work

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step, and where its results arrive."""

    work: Work
    result: PendingResult
    launched_at: float  # time.perf_counter()


class Engine:
    """Serves one thread at a time.

    num_steps_ahead: 1 prepares a step while the device runs another; 0 reads results at once.
    budget: bounds the rows of prompts that ride in a step; None: by max_num_batched_tokens.
    planner: shares the rows of a round out, where the runner's sizes are adaptive.
    """

    def __init__(
        self,
        runner: Runner,
        intake: Intake,
        *,
        use_prefix_cache: bool = False,
        num_steps_ahead: int = 0,
        budget: PromptBudget | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.runner = runner
        self.intake = intake
        self.num_steps_ahead = num_steps_ahead
        self._use_prefix_cache = use_prefix_cache
        self._budget = budget
        self.planner = planner
        self.feedback = self._new_feedback()
        self.scheduler = self._new_scheduler()
        self._in_flight: deque[InFlight] = deque()
        self._step_masks = StepMasks()
        self._unfinished: dict[str, list[Request]] = {}  # samples by request id
        self._totals = Totals()
        self._deliveries = Deliveries(intake.tokenizer, self._totals)
        self._num_compiled = compilations().unexpected.total()  # for other engines, before this one
        self.owner: threading.Thread | None = None  # if set, the only thread that may call

    def add_requests(
        self, batch: Iterable[NewRequest | tuple[Prompt, SamplingParams]]
    ) -> list[Request]:
        """Check and queue requests. On a ValueError, which says what is wrong, none is queued.

        Returns the first sample of each, which refers to the others.
        """
        self.check_caller()
        self.check_ranks()
        new = [
            each if isinstance(each, NewRequest) else NewRequest(prompt=each[0], params=each[1])
            for each in batch
        ]
        added = {samples[0].request_id: samples for samples in map(self.intake.samples, new)}
        taken = [name for name in added if name in self._unfinished]
        if taken or len(added) < len(new):
            raise ValueError(
                f"request_id {taken or 'given twice'}: give each running request an id of its own"
            )
        for samples in added.values():
            self.scheduler.blocks.check_fits(samples[0])
        for samples in added.values():
            self.intake.draw_seed(samples)
        self._unfinished |= added
        for sample in itertools.chain.from_iterable(added.values()):
            self.scheduler.add(sample)
        return [samples[0] for samples in added.values()]

    def check_caller(self) -> None:
        """RuntimeError if another thread owns the engine: a call would disturb its steps."""
        if self.owner is not None and threading.current_thread() is not self.owner:
            raise RuntimeError(
                "this engine belongs to an AsyncLLM, and only its thread may call it: use "
                "generate, chat and abort of the AsyncLLM, not of its llm or engine"
            )

    def check_ranks(self) -> None:
        """RankError if the engine has other ranks, and one of them has failed."""
        if self.runner.followers is not None:
            self.runner.followers.check()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> list[Request]:
        """Launch the next step and read results of an earlier one; returns the changed requests.

        If a step is interrupted (Ctrl-C, a device error), all requests end; new ones can be added
        afterwards. Other ranks may have run the step, so an engine that has some ends then.
        """
        self.check_caller()
        try:
            return self._step()
        except BaseException as error:
            self._end_all_after(error)
            raise

    def _step(self) -> list[Request]:
        changed = self._catch_up()
        if not self._in_flight:
            self._learn()
        plan = self.scheduler.schedule()
        starts = [(request.state_row, self._row_start(request)) for request in plan.admitted]
        self.runner.start_rows(starts, plan.grown)
        changed += [] if plan.work is None else self._launch(plan.work)
        self._learn()  # beside what was launched
        is_ahead = len(self._in_flight) > self.num_steps_ahead
        if self._in_flight and (is_ahead or plan.work is None):
            changed += self._take(self._in_flight.popleft())
        if not self._in_flight or not self._unfinished:
            self._learn()
        return changed

    def _catch_up(self) -> list[Request]:
        """Read all results before the next step, where it depends on them.

        A guided request's masks need all its tokens. And where steps in flight may end most
        requests, another one would do little work; draft levels still run while the host reads.
        """
        changed: list[Request] = []
        scheduler = self.scheduler
        while self._in_flight and (
            scheduler.may_lack_work or any(each.waits_for_results for each in scheduler.running)
        ):
            changed += self._take(self._in_flight.popleft())
        return changed

    def abort(self, request_id: str) -> list[Request]:
        """End a request; returns its samples that had not ended, none if the id is unknown."""
        self.check_caller()
        samples = self._unfinished.get(request_id, [])
        running = [sample for sample in samples if sample.finish is None]
        for sample in running:
            sample.end("abort")
        self._release(running)
        return running

    def abort_all(self) -> list[Request]:
        self.check_caller()
        return [sample for name in list(self._unfinished) for sample in self.abort(name)]

    def metrics(self) -> list[Metric]:
        """Count what happened since the start, and what runs now."""
        self.check_caller()
        # of copies, since any thread may call; without those whose last step is still in flight
        samples = itertools.chain.from_iterable(self._unfinished.copy().values())
        unfinished = [sample for sample in samples if sample.finish is None]
        num_running = sum(sample.finish is None for sample in self.scheduler.running.copy())
        held = {block for sample in unfinished for block in sample.blocks.copy()}
        predicted = {} if self.planner is None else self.planner.statistics.round_tokens
        return self._totals.metrics(
            gauges={
                "num_requests_running": num_running,
                "num_requests_waiting": max(len(unfinished) - num_running, 0),
                "kv_cache_usage_perc": len(held) / self.scheduler.pool.num_blocks,
            },
            counts={
                "levels_drafted": self.runner.num_levels,
                "tree_rounds": self.runner.num_tree_rounds,
                **{f"round_tokens_{name}": count for name, count in predicted.items()},
            },
            steps={name: each.sums() for name, each in self.runner.graphs.counters().items()},
            num_compilations=compilations().unexpected.total() - self._num_compiled,
        )

    def drain(self) -> None:
        """Read the results of all steps in flight, so that ended requests release their blocks."""
        self.check_caller()
        while self._in_flight:
            self._take(self._in_flight.popleft())
        self._learn()

    def watch_ranks(self, told: Callable[[], object]) -> None:
        """Have this called, by another thread, if one of the other ranks fails."""
        if self.runner.followers is not None:
            self.runner.followers.tell(told)

    def end_ranks(self) -> None:
        """Let the other ranks of the engine end, if it has some. It takes no requests then."""
        if self.runner.followers is not None:
            free = self.runner.graphs.clear_all_graphs
            self.runner.followers.end("the engine was shut down", free)

    def _new_scheduler(self) -> Scheduler:
        sizes = self.runner.sizes
        pool = BlockPool(sizes.num_kv_blocks)
        return Scheduler(pool, sizes, self._use_prefix_cache, self._budget, self.planner)

    def _new_feedback(self) -> Feedback | None:
        return None if self.planner is None else Feedback(self.planner, self.runner)

    def _end_all_after(self, error: BaseException) -> None:
        """End all requests: after an interrupted step, rows and blocks are in an unknown state."""
        for sample in itertools.chain.from_iterable(self._unfinished.values()):
            if sample.finish is None:
                sample.end("error", f"a step was interrupted: {type(error).__name__}: {error}")
        for samples in self._unfinished.values():
            self._totals.ended(samples)
        self._unfinished.clear()
        self._in_flight.clear()
        self.feedback = self._new_feedback()
        self._step_masks = StepMasks()
        self.scheduler = self._new_scheduler()
        if self.runner.followers is not None:
            self.runner.followers.fail_after(error)

    # launch

    def _row_start(self, request: Request) -> RowStart:
        rules = request.rules
        stop_ids = {*rules.eos_token_ids, *rules.stop_token_ids} if rules.min_tokens else ()
        return RowStart(
            blocks=request.blocks,
            num_draft_tokens=request.num_speculative_tokens,
            min_position=len(request.prompt_token_ids) + rules.min_tokens,
            stop_ids=sorted(stop_ids),
            sampling=request.sampling,
            generated=request.token_ids[:-1],
        )

    def _launch(self, work: Work) -> list[Request]:
        """Launch a step. If memory runs out, the step's requests end and are returned."""
        try:
            result = self._run(work)
        except torch.OutOfMemoryError as error:
            if self.runner.followers is not None:  # they have run the step
                raise
            return self._fail(work, error)
        self._step_masks.launched(work, result)
        self._totals.launched(work.num_verify_rows)
        self._in_flight.append(InFlight(work, result, time.perf_counter()))
        return []

    def _run(self, work: Work) -> PendingResult:
        ends = zip(work.prompts, work.parts, strict=True)
        decided = [*work.verifying, *(request for request, part in ends if part.ends_prompt)]
        bounds = [request.num_tokens + request.most_pending for request in work.verifying]
        drafted = partial(num_drafted, max_model_len=self.runner.sizes.max_model_len)
        if self.feedback is not None:
            self.feedback.prepare()
        return self.runner.run_step(
            work.state_rows,
            work.parts,
            max_num_computed=max(bounds, default=1) - 1,
            flags=SamplingFlags.of_all(request.flags for request in decided),
            shape=work.shape,
            shared_rows=work.shared_rows,
            next_shape=work.next_shape,
            masks=self._step_masks.of_step(work, drafted),
        )

    def _fail(self, work: Work, error: torch.OutOfMemoryError) -> list[Request]:
        message = (
            f"out of memory in a step of {len(work.requests)} requests: lower "
            f"gpu_memory_utilization, max_num_seqs or max_num_batched_tokens ({error})"
        )
        logger.error(message)
        failed = [request for request in work.requests if request.finish is None]
        for request in failed:
            request.end("error", message)
            request.has_faulty_blocks = True
        self.scheduler.finish_step(work)
        self._step_masks = StepMasks()  # masks that it began may still be on the way
        self._release(failed)
        torch.cuda.empty_cache()
        return failed

    # results

    def _take(self, step: InFlight) -> list[Request]:
        result = step.result.read()
        if self.runner.followers is not None:
            self.runner.followers.check()  # a rank that failed has sent garbage, or nothing
            self.runner.followers.compare(step.result, result)
        if self.feedback is not None:
            self.feedback.observe(step.work, step.result, result, step.launched_at)
        before = [request for request in step.work.requests if request.finish is None]
        changed = self._deliveries.give(step.work, result)
        self.scheduler.finish_step(step.work)
        self._release([request for request in before if request.finish is not None])
        if not self._unfinished and logger.isEnabledFor(logging.DEBUG):
            logger.debug("graphs: %s", summary(self.runner.graphs.counters()))
        return changed

    def _learn(self) -> None:
        if self.feedback is not None:  # without a step in flight, the next one waits for this
            self.feedback.learn(has_time=bool(self._in_flight and self._unfinished))

    def _release(self, ended: Sequence[Request]) -> None:
        for request in ended:
            self.scheduler.drop(request)
            if request.is_finished and request.request_id in self._unfinished:
                self._totals.ended(self._unfinished.pop(request.request_id))
