"""The burst of `specdec bench --suite requests` without a device: all requests arrive at once.

And the loop of the suite "loop" with as many requests.

Scheduler, prompt budget and planner are the real ones; a cost table is time, and drafts hold by
chance. Each step is scheduled before the results of the one before it are read.
"""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from specdec.bench.loop import PROMPT_LENGTHS
from specdec.bench.requests import NUM_REQUESTS, draw_jobs
from specdec.config import MAX_PROMPT_SLOWDOWN
from specdec.passes.captured import shared_shapes
from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import Detokenizer
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.round_history import RoundOutcome
from specdec.scheduling.row_planner import RowPlanner, StepSize
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_costs import PromptBudget, RoundCosts, StepCosts
from specdec.sizes import EngineSizes
from tests.specdec.scheduling.draft_world import Draft, K, logit, sigmoid

# about those of an 8B pair on an H200
COSTS = RoundCosts(
    verify=(
        *((16, 4.46), (64, 4.69), (128, 5.08), (160, 5.83), (192, 6.27), (256, 7.18)),
        *((320, 8.96), (384, 9.56), (512, 11.55), (640, 14.3), (768, 16.9), (896, 19.5)),
    ),
    mixed=(
        *((64, 5.7), (128, 6.5), (256, 8.6), (384, 10.5), (512, 12.6), (640, 15.6)),
        *((768, 18.2), (896, 20.8), (1024, 23.2), (2048, 44.0)),
    ),
    plain=((64, 4.6), (128, 5.0), (192, 6.0), (256, 6.9)),
    level=((64, 0.22), (128, 0.31), (160, 0.36), (192, 0.41), (256, 0.5)),
    ms_per_key=0.00002,
    skipped_ms=0.03,
)
MEANS = (0.65, 0.64, 0.63, 0.62, 0.6, 0.6, 0.59, 0.58)
PHASES = ("prompts", "256 to 64", "64 to 8", "below 8")


@dataclass(slots=True)
class Phase:
    """Sums over its steps. levels: by requests that verify."""

    ms: float = 0.0
    steps: int = 0
    rows: int = 0
    prompt_rows: int = 0
    levels: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Step:
    """A launched step and its results, until they are read."""

    work: object
    ms: float
    phase: Phase
    accepted: np.ndarray
    verified: np.ndarray | None = None  # None: there were no drafts
    confidences: np.ndarray | None = None


class BurstWorld:
    """num_levels: K of all requests, 0: plain; None: as the planner says.

    between_requests, means: see Draft. slower: how many times as long steps with drafts take.
    phases: of the last burst
    """

    def __init__(self, num_levels=None, between_requests=0.35, seed=0, means=MEANS, slower=1.0):
        self.sizes = EngineSizes(
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=8192,
            max_model_len=1024 + 512 + 1,
            num_kv_blocks=32 * NUM_REQUESTS,
            num_speculative_tokens=K if num_levels is None else num_levels,
            is_adaptive=num_levels is None,
        )
        self.rng = np.random.default_rng(seed)
        self.draft = Draft(means=means, between_requests=between_requests)
        self.slower = slower
        self.planner = None
        if num_levels is None:
            self.planner = RowPlanner(COSTS, shared_shapes(self.sizes), K)
        rounds = COSTS.plain if num_levels == 0 else COSTS.verify
        costs = StepCosts(rounds=rounds, mixed=COSTS.mixed, ms_per_key=COSTS.ms_per_key)
        self.budget = PromptBudget(costs=costs, slowdown=MAX_PROMPT_SLOWDOWN)

    @property
    def seconds(self):
        return sum(phase.ms for phase in self.phases.values()) / 1e3

    def burst(self):
        """All requests, from the first step to the last."""
        self.begin()
        for num_prompt, num_tokens in lengths():
            self.add(num_prompt, num_tokens)
        unread = []
        while self.scheduler.has_unfinished:
            while unread and self.scheduler.may_lack_work:
                self.read(unread.pop(0))
            self.step(unread)
        return self

    def loop(self, num_tokens, num_steps=600):
        """Tokens a second where each request that ends is followed by another, as in the bench.

        The first ones ask for 1 to num_tokens tokens; a third of the steps does not count.
        """
        self.begin()
        chance = random.Random(0)
        running, unread = [], []
        for n in range(num_steps):
            if n == num_steps // 3:
                self.phases = {name: Phase() for name in PHASES}
            running = [request for request in running if request.finish is None]
            for _ in range(NUM_REQUESTS - len(running)):
                tokens = num_tokens if n else chance.randint(1, num_tokens)
                running.append(self.add(chance.randint(*PROMPT_LENGTHS), tokens))
            self.step(unread)
        return sum(phase.tokens for phase in self.phases.values()) / self.seconds

    def begin(self):
        self.phases = {name: Phase() for name in PHASES}
        pool = BlockPool(self.sizes.num_kv_blocks)
        self.scheduler = Scheduler(pool, self.sizes, False, self.budget, self.planner)
        self.easy = {}

    def add(self, num_prompt, num_tokens):
        num_drafts = self.sizes.num_speculative_tokens
        request = new_request(len(self.easy), num_prompt, num_tokens, num_drafts)
        self.easy[request] = self.rng.normal()
        self.scheduler.add(request)
        return request

    def step(self, unread):
        """Schedule the next one before the results of the last one are read."""
        work = self.scheduler.schedule().work
        if work is not None:
            unread.append(self.launch(work))
        if unread and (work is None or len(unread) > 1):
            self.read(unread.pop(0))

    def launch(self, work):
        phase = self.phase(work)
        step = Step(work, self.ms(work), phase, np.zeros(len(work.verifying), int))
        phase.ms += step.ms
        phase.steps += 1
        phase.rows += work.num_verify_rows
        phase.prompt_rows += num_prompt_rows(work)
        phase.requests += len(work.verifying)
        phase.levels += num_levels(work) * len(work.verifying)
        if work.verifying:
            easy = np.array([self.easy[each] for each in work.verifying])
            truth, said = self.draft.draw(self.rng, easy)
            held = np.cumprod(self.rng.random(truth.shape) < truth, axis=1)
            if self.planner is None:
                step.accepted = held[:, : work.shape.nodes].sum(axis=1)
            elif work.num_live:
                self.share(step, said)
                step.accepted = np.minimum(held.sum(axis=1), step.verified)
        return step

    def phase(self, work):
        if work.parts:
            return self.phases["prompts"]
        B = len(work.verifying)
        return self.phases["256 to 64" if B > 64 else "64 to 8" if B >= 8 else "below 8"]

    def ms(self, work):
        B, num_rows, levels = len(work.verifying), work.num_verify_rows, num_levels(work)
        ms = COSTS.ms_per_key * sum(each.num_tokens for each in work.verifying)
        is_plain = levels == 0 and num_rows == B
        if work.parts:
            ms += COSTS.mixed_ms(num_rows + num_prompt_rows(work))
        elif is_plain:
            return ms + COSTS.plain_ms(B)
        else:
            ms += COSTS.verify_ms(num_rows)
        ms += max(levels - 1, 0) * COSTS.level_ms(len(work.requests))
        return ms if is_plain else self.slower * ms

    def share(self, step, said):
        """Rows go to the drafts with the largest calibrated path probabilities."""
        B, num_live = len(said), step.work.num_live
        paths = self.paths(said)
        goes_on = paths[:, : num_live - 1].mean(axis=0) >= self.planner.threshold
        is_live = np.arange(K) < min(1 + goes_on.cumprod().sum(), num_live)
        by_level = np.where(is_live, paths, 0.0)[:, :num_live].T.ravel()
        best = np.argsort(-by_level, kind="stable")[: step.work.num_verify_rows - B]
        step.verified = np.bincount(best[by_level[best] > 0] % B, minlength=B)
        step.confidences = np.where(is_live, said, 0.0).astype(np.float32)

    def paths(self, said):
        a, b = self.planner.calibration[0].T
        return np.cumprod(sigmoid(a + b * logit(np.clip(said, 1e-4, 1 - 1e-4))), axis=1)

    def read(self, step):
        if self.planner is not None and step.work.verifying:
            self.learn(step)
        counts = [*(1 + step.accepted), *(int(part.samples) for part in step.work.parts)]
        for request, count in zip(step.work.requests, counts, strict=True):
            if count and request.finish is None:
                num_before = len(request.token_ids)
                request.append([7] * int(count), 0.0)
                step.phase.tokens += len(request.token_ids) - num_before
        self.scheduler.finish_step(step.work)

    def learn(self, step):
        """As the engine tells its planner."""
        work = step.work
        size = StepSize(
            num_requests=len(work.verifying),
            num_rows=work.num_verify_rows,
            num_prompt_rows=num_prompt_rows(work),
            num_levels=work.next_shape.levels,
            num_keys=sum(each.num_tokens for each in work.verifying),
        )
        self.planner.observe_time(size, step.ms)
        if step.verified is None:
            self.planner.observe_plain(len(work.verifying))
            return
        runs = np.array([each.finish is None for each in work.verifying])
        outcome = RoundOutcome(
            confidences=step.confidences,
            num_live=work.num_live,
            num_verified=step.verified * runs,
            num_accepted=step.accepted * runs,
            is_sampled=np.zeros(len(runs), bool),
            num_allowed=K * runs,
        )
        self.planner.observe(outcome)


@cache
def lengths():
    """Of prompts and answers."""
    jobs = draw_jobs([[0]], NUM_REQUESTS)
    return [(len(prompt), params.max_tokens) for prompt, params in jobs]


def new_request(number, num_prompt, num_tokens, num_drafts):
    return Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=[0] * num_prompt,
        params=SamplingParams(temperature=0.0),
        rules=FinishRules(max_tokens=num_tokens),
        detokenizer=Detokenizer(None),
        stats=RequestStats(),
        number=number,
        num_speculative_tokens=num_drafts,
    )


def num_prompt_rows(work):
    return sum(part.length for part in work.parts)


def num_levels(work):
    return work.next_shape.levels
