"""A closed loop without a device: a cost table is time, and drafts hold by chance.

The scheduler decides, with a planner or without.
As many requests run at all times; when one ends, the next begins with a prompt. Each step is
scheduled before the results of the one before it are read. The planner is told what an engine would
tell it, and never how probable drafts really are.
"""

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import Detokenizer
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.scheduler import Scheduler
from specdec.sizes import EngineSizes, TreeShape
from tests.specdec.scheduling.chance import GOOD, K

PROMPTS = 25, 160
TREE = TreeShape(
    num_levels=K, top_k=4, num_nodes=15, smaller=((2, 6, 15), (5, 6, 9), (7, 5, 7))
)  # that of "auto"
SIBLINGS = (0.45, 0.22, 0.11)  # chances of a node's further children, by that of its first
# about those of an 8B pair on an H200
ROUNDS = (
    *((16, 4.46), (64, 4.69), (128, 5.08), (160, 5.83), (192, 6.27), (256, 7.18)),
    *((320, 8.96), (384, 9.56), (512, 11.55), (640, 14.3), (768, 16.9), (1024, 22.2)),
)
MIXED = (
    *((64, 5.7), (128, 6.5), (256, 8.6), (384, 10.5), (512, 12.6), (640, 15.6)),
    *((768, 18.2), (896, 20.8), (1024, 23.2), (2048, 44.0)),
)
PLAIN = ((16, 4.35), (64, 4.55), (128, 4.95), (192, 6.0), (256, 6.9))
LEVEL = ((16, 0.2), (64, 0.22), (128, 0.31), (160, 0.36), (192, 0.41), (256, 0.5))
KEY = 0.00002
SKIPPED = 0.03
TREE_ROUNDS = ((1, 5.95), (2, 5.65), (4, 5.8), (6, 5.95), (8, 5.7))  # all levels
TREE_STOPPED = ((1, 4.55), (2, 4.6), (4, 4.7), (6, 4.75), (8, 4.8))  # the first level alone


def ms_at(measured, size):
    """Take the first size that holds these; beyond the largest, time grows in proportion."""
    for rows, ms in measured:
        if size <= rows:
            return ms
    return measured[-1][1] * size / measured[-1][0]


@dataclass
class Chain:
    """One request's drafts. said: of each, given those before; held: if all were verified."""

    said: np.ndarray
    paths: np.ndarray  # as the device has them, calibrated
    num_held: int


@dataclass
class Tree:
    """One request's nodes, the most probable first. path: rows of those that hold, 1 the first."""

    probs: list[float]
    parents: list[int]
    path: list[int]


@dataclass
class Step:
    """A launched step, and its results until they are read."""

    work: Any
    ms: float
    told_ms: float  # of its target, and of the drafts made before it, as the results of both tell
    counts: list[int]  # tokens of each request that verifies
    drafts: list[Any] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    is_tree: bool = False


class LoopWorld:
    """adapter: makes a planner of these costs and tells it of steps; None: `fixed` drafts for all.

    fixed: K of chains, 0 plain, or "tree". share_sampled: of the requests. slower: how many times
    as long steps with drafts take. answer: tokens of each request
    """

    def __init__(
        self,
        num_requests,
        draft=GOOD,
        *,
        adapter=None,
        fixed=0,
        share_sampled=0.0,
        seed=0,
        slower=1.0,
        answer=160,
        has_trees=True,
        budget=None,
    ):
        self.num_requests, self.draft, self.slower, self.answer = (
            *(num_requests, draft, slower, answer),
        )
        self.rng, self.chance = np.random.default_rng(seed), random.Random(seed)
        self.traits = random.Random(seed)  # of requests, whatever is drafted
        self.adapter, self.share_sampled = adapter, share_sampled
        is_tree = fixed == "tree"
        self.sizes = EngineSizes(
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            max_model_len=1024,
            num_kv_blocks=8 * num_requests,
            num_speculative_tokens=K if adapter or is_tree else fixed,
            is_adaptive=adapter is not None,
            tree=TREE if is_tree or (adapter and has_trees) else None,
        )
        self.planner = None if adapter is None else adapter.planner(self)
        pool = BlockPool(self.sizes.num_kv_blocks)
        self.scheduler = Scheduler(pool, self.sizes, False, budget, self.planner)
        self.drafts: dict[Request, Any] = {}
        self.easy: dict[Request, float] = {}
        self.numbers = itertools.count()
        self.unread: list[Step] = []
        self.ms, self.tokens, self.levels, self.kinds = [], [], [], []
        self.first_steps, self.began = [], {}
        self.drafts_ms = 0.0
        for _ in range(num_requests):
            self.begin(self.chance.randint(1, answer))

    def begin(self, num_tokens):
        is_sampled = self.traits.random() < self.share_sampled
        request = Request(
            request_id=str(next(self.numbers)),
            prompt=None,
            prompt_token_ids=[0] * self.traits.randint(*PROMPTS),
            params=SamplingParams(temperature=float(is_sampled)),
            rules=FinishRules(max_tokens=num_tokens),
            detokenizer=Detokenizer(None),
            stats=RequestStats(),
            number=len(self.easy),
            num_speculative_tokens=self.sizes.num_speculative_tokens,
        )
        self.easy[request] = self.traits.gauss()
        self.began[request] = len(self.ms)
        self.scheduler.add(request)

    def run(self, num_steps):
        for _ in range(num_steps):
            work = self.scheduler.schedule().work
            if work is not None:
                self.unread.append(self.launch(work))
            if self.unread and (work is None or len(self.unread) > 1):
                self.read(self.unread.pop(0))
        return self

    def rate(self, start):
        """Tokens per second since step `start`."""
        return 1000 * sum(self.tokens[start:]) / sum(self.ms[start:])

    # the device

    def launch(self, work):
        step = Step(work, 0.0, 0.0, [1] * len(work.verifying))
        num_live = work.most_drafts if self.adapter is None else work.num_live
        if work.shape.is_wide:
            self.verify_trees(step, TREE.of(len(work.verifying)))
        elif num_live:
            self.verify_chains(step, num_live)
        ends = zip(work.prompts, work.parts, strict=True)
        drafting = [*work.verifying, *(request for request, part in ends if part.ends_prompt)]
        levels = self.levels_of(work)
        is_tree = work.next_shape.is_wide
        if levels and drafting:
            levels = self.propose(drafting, levels, is_tree)
        target_ms, drafts_ms = self.step_ms(work, levels, is_tree)
        step.ms, step.told_ms = target_ms + drafts_ms, target_ms + self.drafts_ms
        self.drafts_ms = drafts_ms
        self.ms.append(step.ms)
        self.levels.append(levels)
        self.kinds.append("tree" if is_tree and levels else "chain" if levels else "plain")
        self.tokens.append(0)
        return step

    def levels_of(self, work):
        if self.adapter is None:
            return self.sizes.num_speculative_tokens
        return work.next_shape.levels

    def step_ms(self, work, num_run, is_tree):
        """Milliseconds of the target and the first draft, and of further levels.

        num_run: levels that ran; the others were launched and skipped.
        """
        n, launched = max(len(work.verifying), 1), self.levels_of(work)
        num_rows = work.num_verify_rows
        num_prompt_rows = sum(part.length for part in work.parts)
        keys_ms = KEY * sum(each.num_tokens for each in work.verifying)
        is_plain = launched == 0 and num_rows == len(work.verifying)
        if is_plain and num_prompt_rows == 0:
            return keys_ms + ms_at(PLAIN, n), 0.0
        rounds = MIXED if num_prompt_rows else ROUNDS
        ms = ms_at(rounds, num_rows + num_prompt_rows)
        level_ms, drafts_ms = ms_at(LEVEL, n), 0.0
        if is_tree and launched:
            shape = TREE.of(n)
            one, every = ms_at(TREE_STOPPED, n), ms_at(TREE_ROUNDS, n)
            drafts_ms = one - ms_at(ROUNDS, n * shape.num_rows)
            drafts_ms += (num_run - 1) * (every - one) / (shape.num_levels - 1)
        elif launched:
            drafts_ms = (num_run - 1) * level_ms + (launched - num_run) * SKIPPED
        else:
            ms -= level_ms
        slower = 1.0 if is_plain else self.slower
        return slower * ms + keys_ms, slower * drafts_ms

    def propose(self, requests, levels, is_tree):
        """Draft for these requests, until all stop; returns the levels that ran."""
        easy = np.array([self.easy[each] for each in requests])
        if is_tree:
            return self.grow(requests, easy, TREE.of(len(requests)))
        drawn = [self.draft.draw(self.rng, easy, level) for level in range(levels)]
        truth, said = (np.stack(each, axis=1) for each in zip(*drawn, strict=True))
        paths = said.cumprod(axis=1)
        num_run = levels
        if self.adapter is not None:
            is_sampled = np.array([each.params.temperature > 0 for each in requests])
            paths = self.adapter.calibrated(self.planner, said, is_sampled).cumprod(axis=1)
            goes_on = paths[:, :-1].mean(axis=0) >= self.planner.threshold
            num_run = 1 + int(goes_on.cumprod().sum())
        held = (self.rng.random(truth.shape) < truth).cumprod(axis=1)[:, :num_run].sum(axis=1)
        for b, request in enumerate(requests):
            chain = Chain(said[b, :num_run], paths[b, :num_run], int(held[b]))
            self.drafts[request] = chain
        return num_run

    def grow(self, requests, easy, shape):
        """Grow trees level by level: children of the most probable nodes of the level before."""
        B, k = len(requests), shape.top_k
        probs, parents = np.ones((B, 1)), np.zeros((B, 1), int)
        said, true, parent_of = [], [], []  # of all candidates, by level
        first, num_run = 0, 0
        for level in range(shape.num_levels):
            easy_of = np.broadcast_to(easy[:, None], probs.shape)
            t, s = self.draft.draw(self.rng, easy_of, level)
            children = [np.stack([x, *(np.minimum(x, 1 - x) * share for share in SIBLINGS)], -1)
                        for x in (t, s)]  # fmt: skip
            of_level = (probs[..., None] * children[1]).reshape(B, -1)
            said.append(of_level)
            true.append(children[0].reshape(B, -1))
            parent_of.append(np.repeat(parents, k, axis=1))
            num_run = level + 1
            threshold = 0.0 if self.planner is None else self.planner.threshold
            if of_level.max(axis=1).mean() < threshold:
                break
            best = np.argsort(-of_level, axis=1, kind="stable")[:, :k]
            probs = np.take_along_axis(of_level, best, axis=1)
            parents = 1 + first + best
            first += of_level.shape[1]
        said, true, parent_of = (np.concatenate(each, axis=1) for each in (said, true, parent_of))
        order = np.argsort(-said, axis=1, kind="stable")[:, : shape.num_nodes]
        for b, request in enumerate(requests):
            self.drafts[request] = self.kept(order[b], said[b], true[b], parent_of[b])
        return num_run

    def kept(self, order, said, true, parent_of):
        number = {0: 0} | {int(place) + 1: row for row, place in enumerate(order, start=1)}
        parents = [number[int(parent_of[place])] for place in order]
        path, at = [], 0
        while True:
            chance = self.rng.random()
            for row, (place, parent) in enumerate(zip(order, parents, strict=True), start=1):
                if parent == at:
                    chance -= true[place]
                    if chance < 0:
                        path.append(row)
                        at = row
                        break
            else:
                return Tree([float(said[place]) for place in order], parents, path)

    def verify_chains(self, step, num_live):
        """Give rows to the most probable drafts of the batch."""
        work = step.work
        step.drafts = [self.drafts.get(each) for each in work.verifying]
        num_left = work.num_verify_rows - len(work.verifying)
        if self.adapter is None:
            step.verified = [min(num_live, len(each.said)) for each in step.drafts]
        else:
            live = [(-p, level, b) for b, chain in enumerate(step.drafts)
                    for level, p in enumerate(chain.paths[:num_live])]  # fmt: skip
            step.verified = [0] * len(work.verifying)
            for _, _, b in sorted(live)[:num_left]:
                step.verified[b] += 1
        each = zip(step.drafts, step.verified, strict=True)
        step.counts = [1 + min(chain.num_held, verified) for chain, verified in each]

    def verify_trees(self, step, shape):
        step.is_tree = True
        step.drafts = [self.drafts[each] for each in step.work.verifying]
        step.verified = [min(len(each.probs), shape.num_nodes) for each in step.drafts]
        for b, tree in enumerate(step.drafts):
            path = [row for row in tree.path if row <= shape.num_nodes][: shape.max_depth]
            step.counts[b] = 1 + len(path)

    # the host

    def read(self, step):
        if self.adapter is not None and step.work.verifying:
            self.adapter.observe(self.planner, step)
        ended = 0
        counts = [*step.counts, *(int(part.samples) for part in step.work.parts)]
        for request, count in zip(step.work.requests, counts, strict=True):
            if count == 0 or request.finish is not None:
                continue
            if not request.token_ids:
                self.first_steps.append(len(self.ms) - self.began[request])
            num_before = len(request.token_ids)
            request.append([7] * count, 0.0)
            self.tokens[-1] += len(request.token_ids) - num_before
            ended += request.finish is not None
        self.scheduler.finish_step(step.work)
        for _ in range(ended):
            self.begin(self.answer)
