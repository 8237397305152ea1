"""A closed loop without an engine: requests, drafts that hold by chance, a clock from a cost table.

The planner sees what an engine would show it, one round late, and never the true conditionals. A
fixed setting meets the same requests and the same chances, round by round.
"""

from dataclasses import dataclass, replace

import numpy as np

from specdec.scheduling.round_history import RoundOutcome
from specdec.scheduling.round_options import RequestCounts
from specdec.scheduling.row_planner import NextRound, RoundPlan, RowPlanner, StepSize
from specdec.scheduling.step_costs import RoundCosts, TreeCosts
from specdec.sizes import TreeShape

K = 8
ROWS = (1, 64, 96, 128, 192, 256, 384, 512)
MS = (4.06, 4.06, 4.4, 4.4, 5.9, 7.7, 10.2, 12.5)  # 8B on an H200
COSTS = RoundCosts(
    verify=tuple((rows, ms + 0.15) for rows, ms in zip(ROWS, MS, strict=True)),
    plain=tuple(zip(ROWS[:6], MS[:6], strict=True)),
    level=((256, 0.2),),
)
# steps with prompts, by all their rows
MIXED = (
    *((64, 5.2), (128, 6.0), (160, 6.4), (192, 6.8), (256, 8.1), (320, 9.3), (384, 10.0)),
    *((512, 12.1), (640, 15.1), (768, 17.7), (896, 20.3), (1024, 22.7), (2048, 43.5)),
)
PROMPT = 92  # rows, of a request that begins
TREES = TreeCosts(
    all_levels=((1, 5.9), (2, 6.0), (4, 6.2), (8, 6.9)),
    one_level=((1, 4.4), (2, 4.4), (4, 4.5), (8, 4.8)),
    shape=TreeShape(num_levels=K, top_k=4, num_nodes=15),
)
WITH_TREES = replace(COSTS, tree=TREES, skipped_ms=0.03)
MULTIPLES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
SHAPES = [
    (b, int(b * m))
    for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for m in MULTIPLES
    if b * m <= 512 and b * m == int(b * m)
]


def logit(p):
    return np.log(p / (1 - p))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@dataclass
class Draft:
    """Mean true conditionals by level, spread between requests and between drafts (logits).

    error: the draft's own logit is the true one plus this
    """

    means: tuple[float, ...] = (0.62, 0.55, 0.5, 0.48, 0.46, 0.45, 0.44, 0.43)
    between_requests: float = 0.7
    between_drafts: float = 1.5
    error: float = 0.0

    def draw(self, rng, requests):
        """True conditionals and confidences, [B, K]; requests: [B] how easy each is."""
        spread = rng.normal(size=(len(requests), K)) * self.between_drafts
        truth = logit(np.array(self.means)) * 1.5 + requests[:, None] * self.between_requests
        truth = truth + spread
        return sigmoid(truth), sigmoid(truth + self.error)


GOOD = Draft()
TIMID = Draft(error=-1.33)  # says 0.15 where 0.4 is true
RANDOM = Draft(means=(1e-4,) * K, error=2.0)
BOASTFUL = Draft(means=(1e-4,) * K, error=14.5)  # says about 0.65, and nothing holds


class World:
    """num_requests run at all times; a request lasts about 60 rounds, or has `answer` tokens.

    With `answer`, the prompts of those that begin ride in the next round.
    fixed: drafts and rows of every request; None = as the planner says
    allowed: the bound of every request. slower: how many times as long as by its costs a round with
    drafts takes. better: a level of a tree fails by a chance that is this power of a chain's;
    always_trees: a fixed setting
    """

    def __init__(
        self,
        num_requests,
        draft=GOOD,
        seed=0,
        fixed=None,
        costs=COSTS,
        allowed=K,
        slower=1.0,
        better=1.3,
        always_trees=False,
        answer=None,
    ):
        self.answer = answer
        self.num_prompt_rows = 0  # that ride in the next round
        self.better, self.always_trees = better, always_trees
        self.has_trees = False  # the drafts that exist
        self.is_sampled = False  # all requests
        self.kinds = []  # by round: whether trees were verified
        self.slower = slower
        self.disturbed = 1.0  # how many times as long any round seems to take
        self.rng = np.random.default_rng(seed)
        self.draft, self.costs, self.fixed, self.allowed = draft, costs, fixed, allowed
        self.planner = RowPlanner(costs, SHAPES, K)
        self.live = 0  # levels of the drafts that exist
        self.threshold = 0.0  # at which they stopped
        self.unread = None
        self.ms, self.tokens, self.verified, self.plans = [], [], [], []
        self.resize(num_requests)

    def resize(self, num_requests):
        self.easy = self.rng.normal(size=num_requests)
        if self.answer:
            self.left = self.rng.integers(1, self.answer + 1, size=num_requests)

    def run(self, num_rounds):
        for _ in range(num_rounds):
            self.round()
        return self

    def rate(self, start):
        """Tokens per second since round `start`."""
        return 1000 * sum(self.tokens[start:]) / sum(self.ms[start:])

    def plan(self):
        B = len(self.easy)
        if self.always_trees:
            return RoundPlan(B, K, True)
        if self.fixed is not None:
            return RoundPlan(padded(B) * (self.fixed + 1), self.fixed)
        fit = B <= 8 and self.costs.tree is not None
        num_drafting = B if self.allowed else 0
        return self.planner.plan(
            NextRound(
                RequestCounts(B, num_drafting),
                self.live,
                num_keys=0,
                num_prompt_rows=self.num_prompt_rows,
                has_trees=self.has_trees,
                trees_fit=fit,
                num_sampled=num_drafting * self.is_sampled,
            )
        )

    def round(self):
        B = len(self.easy)
        plan = self.plan()
        if self.unread is not None and self.fixed is None:
            self.read()  # after the next round was launched
        truth, said = self.draft.draw(self.rng, self.easy)
        self.kinds.append(self.has_trees)
        if self.has_trees:
            self.tree_round(plan, truth, said)
            return
        said = np.where(np.arange(K) < self.drafted(said)[:, None], said, 0.0)
        verified = self.share(said, plan.num_rows - B)
        accepted = self.accept(truth, verified)
        self.unread = RoundOutcome(
            confidences=said.astype(np.float32),
            num_live=self.live,
            num_verified=verified,
            num_accepted=accepted,
            is_sampled=np.full(B, self.is_sampled),
            num_allowed=np.full(B, self.allowed),
        )
        self.verified.append(int(verified.sum()))
        self.tokens.append(B + int(accepted.sum()))
        skipped = self.live - int((said > 0).any(axis=0).sum()) if self.live else 0
        saved = self.costs.level_ms(padded(B)) - (self.costs.skipped_ms or 0.0)
        levels = 1 if plan.proposes_tree else plan.num_levels  # a tree's count in the next round
        ms = round_ms(self.costs, padded(B), plan.num_rows, levels, self.num_prompt_rows)
        ms -= skipped * saved  # of the levels drafted a round ago
        if plan.num_levels or plan.num_rows > B:
            ms *= self.slower
        self.ms.append(ms)
        size = StepSize(
            num_requests=B,
            num_rows=plan.num_rows,
            num_prompt_rows=self.num_prompt_rows,
            num_levels=plan.num_levels,
            num_keys=0,
        )
        if not plan.proposes_tree:
            self.planner.observe_time(size, ms * self.disturbed)
        self.goes_on(plan, 1 + accepted)

    def read(self):
        if isinstance(self.unread, dict):
            self.planner.observe_trees(**self.unread)
        else:
            self.planner.observe(self.unread)

    def goes_on(self, plan, num_tokens=1):
        B = len(self.easy)
        self.plans.append(plan)
        self.live = plan.num_levels
        self.has_trees = plan.proposes_tree
        self.threshold = self.planner.threshold if self.fixed is None else 0.0
        ends = self.rng.random(B) < 1 / 60
        if self.answer:
            ends = self.left <= num_tokens
            self.left = np.where(ends, self.answer, self.left - num_tokens)
            self.num_prompt_rows = PROMPT * int(ends.sum())
        self.easy = np.where(ends, self.rng.normal(size=B), self.easy)

    def tree_round(self, plan, truth, said):
        """Drafts stop as a chain's do, but by the draft's own probabilities."""
        B = len(self.easy)
        levels = np.minimum(self.drafted(said, np.cumprod(said, axis=1)), self.allowed)
        chance = self.rng.random(truth.shape)
        in_chains = self.accept(truth, levels, chance)
        accepted = int(self.accept(1 - (1 - truth) ** self.better, levels, chance).sum())
        round_ms = self.costs.tree.ms(B, levels.max()) * self.slower  # with what drafted the tree
        chains = RoundOutcome(
            confidences=np.where(np.arange(K) < levels[:, None], said, 0.0).astype(np.float32),
            num_live=K,
            num_verified=levels,
            num_accepted=in_chains,
            is_sampled=np.full(B, self.is_sampled),
            num_allowed=np.full(B, self.allowed),
        )
        self.unread = {"chains": chains, "num_verified": 15 * B, "num_accepted": accepted}
        self.verified.append(15 * B)
        self.tokens.append(B + accepted)
        self.ms.append(round_ms)
        size = StepSize(
            num_requests=B,
            num_rows=16 * B,
            num_prompt_rows=0,
            num_levels=0,
            num_keys=0,
            has_trees=True,
        )
        self.planner.observe_time(size, round_ms * self.disturbed)
        self.goes_on(plan)

    def drafted(self, said, stopping=None):
        """[B] live levels until all stopped, by paths [B, K]; None: calibrated ones."""
        stopping = self.paths(said) if stopping is None else stopping
        goes_on = stopping[:, : max(self.live - 1, 0)].mean(axis=0) >= self.threshold
        return np.full(len(said), min(1 + goes_on.cumprod().sum(), self.live))

    def paths(self, said):
        """[B, K] calibrated path probabilities."""
        a, b = self.planner.calibration[0].T
        return np.cumprod(sigmoid(a + b * logit(np.clip(said, 1e-4, 1 - 1e-4))), axis=1)

    def share(self, said, num_rows):
        """[B] drafts that get rows: those with the largest calibrated path probabilities."""
        live = min(self.live, self.allowed)
        paths = np.where(said > 0, self.paths(said), 0.0)[:, :live]
        best = np.argsort(-paths.T.ravel(), kind="stable")[:num_rows]  # ties: the lower level
        best = best[paths.T.ravel()[best] > 0]
        return np.bincount(best % len(said), minlength=len(said))

    def accept(self, truth, verified, chance=None):
        chance = self.rng.random(truth.shape) if chance is None else chance
        holds = chance < truth
        holds &= np.arange(K) < verified[:, None]
        return np.cumprod(holds, axis=1).sum(axis=1)


def padded(num_requests):
    """Requests of the captured shapes that hold these."""
    return min(b for b, _ in SHAPES if b >= num_requests)


def round_ms(costs, num_requests, num_rows, num_levels, num_prompt_rows=0):
    if num_prompt_rows:
        level_ms = (num_levels - 1) * costs.level_ms(num_requests)
        return costs.mixed_ms(num_rows + num_prompt_rows) + level_ms
    if num_rows == num_requests and num_levels == 0:
        return costs.plain_ms(num_requests)
    return costs.verify_ms(num_rows) + max(num_levels - 1, 0) * costs.level_ms(num_requests)
