"""Random requests through random engines, each compared with the same request alone.

Requests with any parameters arrive between steps, share beginnings of prompts, are aborted, and
lose their blocks to each other. Each is then run alone, without a draft, and must give the same
tokens, logprobs and text, an aborted one the beginning of them; and alone with its drafts, which
must be the same, and as many accepted. `python -m scripts.soak` runs it.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from tqdm import tqdm

from specdec import LLM
from specdec.engine import Engine
from specdec.requests.intake import NewRequest
from specdec.requests.request import Request
from specdec.rounds.results import PendingResult
from specdec.scheduling.costs import PromptBudget, StepCosts
from specdec.scheduling.work import PromptPart
from specdec.sizes import TreeShape
from tests.random_requests import Limits, Plan, plan_requests
from tests.shared_rows import ROUND_COSTS, at_random, rows_are_shared

MAX_K = 4
MAX_MODEL_LEN = 256
NUM_ROWS = 6
NUM_MANY = 3  # requests at a time; of as many or more, trees are smallest
PER_ENGINE = 15
# a step of 64 rows fits twice a small round's time, one of 128 does not
COSTS = StepCosts(rounds=((8, 1.0), (64, 2.0)), mixed=((64, 2.0), (128, 4.0)), ms_per_key=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An engine. slowdown: of the prompt budget; None: the engine's own budget, if it has one.

    tree: top_k and num_draft_tokens, with is_adaptive of some rounds; None: chains. threshold: at
    which drafts stop; None: never, or as the planner says
    """

    num_speculative_tokens: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    async_scheduling: bool
    slowdown: float | None
    is_adaptive: bool
    tree: tuple[int, int] | None = None
    threshold: float | None = None

    @staticmethod
    def drawn(
        chance: random.Random, is_adaptive: bool = False, has_tree: bool = False
    ) -> "Setting":
        setting = Setting(
            is_adaptive=is_adaptive,
            num_speculative_tokens=chance.randint(1, MAX_K),
            max_num_batched_tokens=chance.choice([1, 7, 40, 64, 96, MAX_MODEL_LEN]),
            num_kv_blocks=chance.choice([4, 5, 6, 24]),
            async_scheduling=chance.random() < 0.5,
            slowdown=chance.choice([None, 1.0, 2.0]),
        )
        if is_adaptive or has_tree:  # other drafts are not compared with those of requests alone
            threshold = chance.choice([None, 0.05, 0.3])
            if setting.num_speculative_tokens > 1:  # else no draft could stop
                setting = replace(setting, threshold=threshold)
        if not has_tree:
            return setting
        k, levels = chance.randint(2, MAX_K), setting.num_speculative_tokens
        most = min(k + k * k * (levels - 1), 20)
        least = levels if is_adaptive else 1
        return replace(setting, tree=(k, chance.randint(least, most)))

    @property
    def shape(self) -> TreeShape | None:
        """The tree that is offered beside chains."""
        if not self.is_adaptive or self.tree is None:
            return None
        k, num_nodes = self.tree
        K = self.num_speculative_tokens
        least = next(L for L in range(1, K + 1) if k + k * k * (L - 1) >= num_nodes)
        fewer, least = (num_nodes + 1) // 2, max(least, 2)
        between = (2, (K + least) // 2, (num_nodes + fewer) // 2)
        smaller = (between, (NUM_MANY, least, fewer)) if K > 1 else ()
        return TreeShape(num_levels=K, top_k=k, num_nodes=num_nodes, smaller=smaller)

    def build(self, **options: object) -> LLM:
        K = self.num_speculative_tokens
        draft = {"model": "demo", "num_speculative_tokens": K, "adaptive": self.is_adaptive}
        draft["draft_confidence_threshold"] = self.threshold
        if self.tree is not None and not self.is_adaptive:
            draft |= zip(("top_k", "num_draft_tokens"), self.tree, strict=True)
        llm = LLM(
            "demo",
            draft,
            max_num_seqs=NUM_ROWS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_kv_blocks=self.num_kv_blocks,
            async_scheduling=self.async_scheduling,
            **options,
        )
        if self.slowdown is not None:
            llm.engine.scheduler.prompts.budget = PromptBudget(costs=COSTS, slowdown=self.slowdown)
        return llm

    def limits(self, chance: random.Random) -> Limits:
        """Short prompts where they take many steps, and mostly where blocks are few."""
        longest = chance.choice([60, 60, 230] if self.num_kv_blocks < 8 else [60, 230, 230])
        return Limits(
            max_prompt=min(longest, 40 * self.max_num_batched_tokens),
            max_tokens=30,
            num_speculative_tokens=self.num_speculative_tokens,
            is_special=chance.choice([0.0, 0.4, 0.8]),
        )


class Alone:
    """Every request by itself, op by op: without a draft, and with one."""

    def __init__(self, device: str) -> None:
        draft = {"model": "demo", "num_speculative_tokens": MAX_K, "adaptive": False}
        sizes = {"max_num_seqs": 1, "max_model_len": MAX_MODEL_LEN, "enforce_eager": True}
        self._plain, self._drafting = (
            LLM("demo", each, device=device, enable_prefix_caching=False, **sizes)
            for each in (None, draft)
        )

    def run(self, plan: Plan) -> tuple[list[Request], list[Request]]:
        """The samples of both."""
        plain = _run_one(self._plain.engine, plan.new_request(has_draft=False))
        return plain, _run_one(self._drafting.engine, plan.new_request())


def _run_one(engine: Engine, new: NewRequest) -> list[Request]:
    [request] = engine.add_requests([new])
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    return request.all_samples


def run_together(engine: Engine, plans: list[Plan]) -> list[Request]:
    """All requests through one engine, step by step."""
    requests: list[Request] = []
    step = 0
    while len(requests) < len(plans) or engine.has_unfinished:
        while len(requests) < len(plans) and plans[len(requests)].arrival <= step:
            requests += engine.add_requests([plans[len(requests)].new_request()])
        for plan, request in zip(plans, requests, strict=False):
            if plan.abort == step:
                engine.abort(request.request_id)
        engine.step()
        step += 1
    engine.drain()
    return requests


def count_steps(engine: Engine, counts: Counter[str]) -> None:
    """Count steps from here on, and those in which prompts ride."""
    real = engine.runner.run_step

    def run_step(
        rows: Sequence[int], parts: Sequence[PromptPart], **options: object
    ) -> PendingResult:
        counts["steps"] += 1
        counts["mixed_steps"] += bool(rows and parts)
        return real(rows, parts, **options)

    engine.runner.run_step = run_step


def faults_of(
    ours: Request, plain: Request, drafting: Request, has_other_drafts: bool = False
) -> Iterator[str]:
    """What differs between a sample and the same one alone."""
    whole = ours.finish is not None and ours.finish.reason != "abort"
    pairs = {
        "tokens": (ours.token_ids, plain.token_ids),
        "logprobs": (ours.logprobs, plain.logprobs),
        "prompt logprobs": (ours.prompt_logprobs, plain.prompt_logprobs),
    }
    if ours.stats.num_preemptions == 0 and not has_other_drafts:
        pairs["drafts"] = ours.stats.rounds, drafting.stats.rounds
    for name, (found, expected) in pairs.items():
        expected = expected if whole else expected[: len(found)]
        if found != expected:
            yield f"{name} differ: {_first_difference(found, expected)}"
    if whole and (ours.text(), ours.finish) != (plain.text(), plain.finish):
        yield "text or end differ"


def _first_difference(found: Sequence[object], expected: Sequence[object]) -> str:
    both = zip(found, expected, strict=False)
    ends = f"{len(found)} and {len(expected)} of them"
    return next(
        (f"{i}: {one} and {other}" for i, (one, other) in enumerate(both) if one != other), ends
    )


def count_faults(plan: Plan, sample: Request) -> Iterator[str]:
    """A round adds its accepted tokens and one, a prompt one, a resumed prefill none."""
    stats = sample.stats
    surplus = 1 + stats.num_rounds + stats.num_accepted_tokens - len(sample.token_ids)
    is_right = 0 <= surplus <= plan.num_speculative_tokens
    if sample.token_ids and not is_right:
        yield f"{surplus} tokens more than rounds account for"


def faults_after(engine: Engine) -> Iterator[str]:
    scheduler = engine.scheduler
    num_held = scheduler.pool.num_blocks - scheduler.pool.num_free
    if num_held or scheduler.has_unfinished or scheduler.num_in_flight:
        yield f"{num_held} blocks are not free after the run"


def soak(
    count: int,
    seed: int,
    device: str = "cpu",
    is_adaptive: bool = False,
    has_trees: bool = False,
    **options: object,
) -> dict[str, object]:
    """Run, check, and count what happened.

    is_adaptive: rows and levels vary, half of the time by chance. has_trees: of fixed levels, any
    width and number of nodes; with is_adaptive, in some rounds. options: of the engines
    """
    began = time.monotonic()
    alone = Alone(device)
    counts: Counter[str] = Counter(requests=count, seed=seed)
    faults = []
    for first in tqdm(range(0, count, PER_ENGINE), desc="engines", disable=None):
        chance = random.Random(seed * 1_000_003 + first)
        setting = Setting.drawn(chance, is_adaptive, has_trees)
        plans = plan_requests(min(PER_ENGINE, count - first), chance, setting.limits(chance))
        costs = ROUND_COSTS if device == "cpu" else None
        with rows_are_shared(costs, setting.shape) if is_adaptive else nullcontext():
            llm = setting.build(device=device, **options)
        if llm.engine.planner is not None:
            at_random(llm, chance)
        faults += [f"{setting}: {fault}" for fault in faults_of_engine(llm, plans, alone, counts)]
        llm.engine.runner.graphs.clear_all_graphs()  # their memory, before garbage is collected
    return {**counts, "faults": faults, "seconds": round(time.monotonic() - began, 1)}


def faults_of_engine(
    llm: LLM, plans: list[Plan], alone: Alone, counts: Counter[str]
) -> Iterator[str]:
    engine = llm.engine
    count_steps(engine, counts)
    requests = run_together(engine, plans)
    counts["replays"] += sum(each.replays.total() for each in llm.graph_counters().values())
    yield from faults_after(engine)
    for plan, request in zip(plans, requests, strict=True):
        for samples in zip(request.all_samples, *alone.run(plan), strict=True):
            count_outcome(samples[0], counts)
            is_other = engine.planner is not None or llm.sizes.tree is not None
            for fault in (*faults_of(*samples, is_other), *count_faults(plan, samples[0])):
                yield f"request {request.request_id}: {fault}"


def count_outcome(sample: Request, counts: Counter[str]) -> None:
    stats = sample.stats
    counts["samples"] += 1
    counts["tokens"] += stats.num_generated_tokens
    counts["rounds"] += stats.num_rounds
    counts["preemptions"] += stats.num_preemptions
    counts["cached_tokens"] += stats.num_cached_tokens
    counts["aborted"] += sample.finish is not None and sample.finish.reason == "abort"
    counts["errors"] += sample.finish is not None and sample.finish.reason == "error"
    counts["logprobs"] += len(sample.logprobs) + len(sample.prompt_logprobs)
