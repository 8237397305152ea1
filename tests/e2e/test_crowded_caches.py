"""Caches so small that most requests lose their blocks: each still gives what it gives alone.

On a CPU blocks have 8 tokens instead of 64, so that short texts cross many of their borders.
"""

import random
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest

from specdec import LLM
from specdec.sizes import BLOCK_SIZE, TreeShape
from tests.random_requests import Plan
from tests.shared_rows import at_random, rows_are_shared
from tests.soak import count_outcome, faults_after, faults_of, run_together
from weights.demo import demo_prompts

DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 99}
FREE = {"ignore_eos": True}
KINDS = {
    "greedy": {"temperature": 0.0, "logprobs": 1, **FREE},
    "forked": {"temperature": 0.8, "n": 2, **FREE},
    "json": {"temperature": 0.0, "structured_outputs": {"json": DIGITS}},
    "regex": {
        "temperature": 1.0,
        "n": 2,
        "logprobs": 2,
        "structured_outputs": {"regex": "([a-z]+ ?){99,}"},
    },
    "penalised": {
        "temperature": 0.9,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "n": 2,
        "logprobs": 2,
        "prompt_logprobs": 1,
        **FREE,
    },
}


NAMES = list(KINDS)


@dataclass(frozen=True, kw_only=True)
class Crowded:
    """An engine. tree: drafted in some rounds where `varies`, since rounds are then planned."""

    k: int
    draft: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    tree: TreeShape | None = None
    varies: bool = False

    def build(self, max_model_len, num_blocks, device):
        draft = {"model": "demo", "num_speculative_tokens": self.k, "adaptive": self.varies}
        with rows_are_shared(tree=self.tree) if self.varies else nullcontext():
            llm = LLM(
                "demo",
                draft | self.draft,
                max_num_seqs=24,
                max_model_len=max_model_len,
                num_kv_blocks=num_blocks,
                device=device,
                **self.options,
            )
        if llm.engine.planner is not None:
            at_random(llm, random.Random(5))
        return llm


ENGINES = {
    "chains": Crowded(k=3),
    "parts of prompts": Crowded(
        k=2, options={"max_num_batched_tokens": 7, "async_scheduling": True}
    ),
    "trees": Crowded(k=2, draft={"top_k": 2, "num_draft_tokens": 5}),
    "in turn": Crowded(
        k=3,
        varies=True,
        options={"async_scheduling": True},
        tree=TreeShape(num_levels=3, top_k=2, num_nodes=6),
    ),
}


@pytest.fixture
def blocks_of(monkeypatch):
    """blocks_of(size): from now on the blocks of new engines have that many tokens."""

    def change(size):
        for name, module in list(sys.modules.items()):
            if name.startswith("specdec.") and getattr(module, "BLOCK_SIZE", None) == BLOCK_SIZE:
                monkeypatch.setattr(module, "BLOCK_SIZE", size)

    return change


def plans_of(count, block_size, most_tokens):
    """Requests of all kinds in turn; some prompts begin alike."""
    chance = random.Random(3)
    prompts = demo_prompts()["prompts"]
    texts = [[token for prompt in prompts[i::8] for token in prompt] for i in (0, 1)]
    least = 3 * most_tokens // 4
    return [
        Plan(
            prompt=chance.choice(texts)[: chance.randint(block_size // 2, 5 * block_size // 2)],
            values=KINDS[NAMES[i % len(NAMES)]]
            | {"seed": i, "max_tokens": chance.randint(least, most_tokens)},
            drafting={},
            priority=chance.choice([0, 0, 1]),
            arrival=i // 3,
            abort=None,
        )
        for i in range(count)
    ]


def alone(plans, max_model_len, device):
    """The samples of each by itself, without a draft and without the prefix cache."""
    sizes = {"max_num_seqs": 1, "max_model_len": max_model_len, "device": device}
    engine = LLM("demo", None, enable_prefix_caching=False, **sizes).engine
    return [
        request.all_samples
        for plan in plans
        for request in run_together(engine, [replace(plan, arrival=0)])
    ]


def count_happenings(request, kind, counts):
    for sample in request.all_samples:
        count_outcome(sample, counts)
        counts["accepted"] += sample.stats.num_accepted_tokens
        counts["tree_rounds"] += sum(bool(each.parents) for each in sample.stats.rounds)
        counts["chain_rounds"] += sum(not each.parents for each in sample.stats.rounds)
        counts[f"preempted {kind}"] += sample.stats.num_preemptions
    counts["forked"] += len(request.all_samples) > 1
    counts["guided"] += request.params.structured_outputs is not None


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Plans, each `times` in each engine."""

    engines: list[str]
    num_plans: int
    times: int
    num_blocks: int
    most_blocks: int  # that one request may need
    share: float  # of a request's context that its longest text may take
    device: str = "cpu"
    block_size: int = 8

    def run(self):
        max_model_len = self.most_blocks * self.block_size
        plans = plans_of(self.num_plans, self.block_size, int(self.share * max_model_len))
        expected = alone(plans, max_model_len, self.device) * self.times
        later = [
            replace(plan, arrival=plan.arrival + 10 * i)
            for i in range(self.times)
            for plan in plans
        ]
        total = Counter()
        for name in self.engines:
            llm = ENGINES[name].build(max_model_len, self.num_blocks, self.device)
            requests = run_together(llm.engine, later)
            assert list(faults_after(llm.engine)) == []
            for i, (request, theirs) in enumerate(zip(requests, expected, strict=True)):
                for sample, other in zip(request.all_samples, theirs, strict=True):
                    faults = list(faults_of(sample, other, other, has_other_drafts=True))
                    assert faults == [], (name, later[i])
                count_happenings(request, NAMES[i % self.num_plans % len(NAMES)], total)
            llm.engine.runner.graphs.clear_all_graphs()
        return total


BRIEF = Soak(engines=["trees"], num_plans=5, times=1, num_blocks=5, most_blocks=4, share=0.5)
WHOLE = Soak(engines=list(ENGINES), num_plans=25, times=2, num_blocks=14, most_blocks=8, share=0.7)
ON_A_GPU = Soak(
    engines=["in turn"],
    num_plans=5,
    times=3,
    num_blocks=8,
    most_blocks=5,
    share=0.65,
    device="cuda",
    block_size=64,
)


@pytest.mark.parametrize(
    "soak, least_preemptions",
    [
        (BRIEF, 3),
        pytest.param(WHOLE, 200, marks=pytest.mark.slow),
        pytest.param(ON_A_GPU, 3, marks=pytest.mark.gpu),
    ],
    ids=["brief", "whole", "cuda"],
)
def test_requests_that_lose_their_blocks_give_what_they_give_alone(
    blocks_of, soak, least_preemptions
):
    blocks_of(soak.block_size)
    counts = soak.run()
    num_requests = len(soak.engines) * soak.num_plans * soak.times
    assert counts["preemptions"] >= least_preemptions
    assert counts["errors"] == 0
    assert counts["guided"] == 2 * num_requests // 5
    assert counts["forked"] == 3 * num_requests // 5
    happened = ["cached_tokens", "accepted", "logprobs", "tree_rounds"]
    if soak is not BRIEF:
        happened += ["chain_rounds", *(f"preempted {kind}" for kind in KINDS)]
    assert {name for name in happened if not counts[name]} == set(), counts
