"""How many rows verify in the next round, and how many levels the draft runs after it.

    planner = RowPlanner(costs, shapes, num_levels=8)
    plan = planner.plan(NextRound(RequestCounts(num_requests, num_drafting), num_live, num_keys))
    ...                                                         the round is launched with this plan
    planner.observe(outcome)                                    its results were read

A round is launched before the last one is read, so the choice rests on statistics of recent rounds.
It changes when tokens come, never which: any choice is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.gains import GainCurves
from specdec.scheduling.probes import Probes, Surprise
from specdec.scheduling.round_history import RoundHistory, RoundOutcome
from specdec.scheduling.round_options import (
    RequestCounts,
    Riding,
    RoundOptions,
    RowSizes,
    StepOptions,
    filling_options,
    levels_ms,
    mixed_options,
    round_options,
    tree_ms,
)
from specdec.scheduling.step_costs import Kind, RoundCosts, TimeRatios
from specdec.scheduling.tree_rounds import TreeRounds

FIRST_LEVELS = 3  # while nothing is known
LEAST_ENTRIES = 8  # of requests and rounds; with fewer nothing is known
LEAST_ROUNDS = 8  # of chains before trees are compared with them: beside trees few run
MERGE_EVERY = 8  # rounds with drafts
EARLY_ROUNDS = 64  # with drafts: up to here each merge fits the calibration
FIT_EVERY = 100  # rounds with drafts, from then on
MOST_AGE = 8  # merges for which a few requests are served by what was estimated before them
PROMPT_MEMORY = 1 / 64  # weight of the latest step in the average load of prompts
THRESHOLDS = (0.0, 0.05, 0.08, 0.12, 0.16, 0.22, 0.3)  # of mean path probabilities, to stop below
MOST_STOPPING = 8  # requests; more draft chains, to which stopping brings nothing
FEW = 8  # requests: each number up to it has an estimate; larger ones serve if a FEWth away
MANY = 8  # requests: with fewer none is left far behind
FILLING = 33  # requests: from here on, prompt rows are assumed to fill the measured step
HURRY = 2.0  # weight of a millisecond where steps should be short


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """num_rows: that verify: of the captured sizes, or, where prompts ride, any number; in a plain
    round one for each request.

    num_levels: that the draft runs after it; proposes_tree: all of a tree's, not those of a chain
    """

    num_rows: int
    num_levels: int
    proposes_tree: bool = False


@dataclass(frozen=True, slots=True)
class NextRound:
    """What a plan is made for.

    requests: that verify, and those of them that may draft at all
    num_live: levels drafted by the step before; 0: there are no drafts
    num_keys: in the caches of the requests
    num_prompt_rows: that will ride
    has_trees: the drafts are trees, which are verified whole. trees_fit: the next ones may be
    hurries: steps should be short, see RowPlanner
    num_sampled: of the requests that may draft; None: not known. Where all are greedy, or all
        sampled, rounds of the other kind say nothing about them
    """

    requests: RequestCounts
    num_live: int
    num_keys: int
    num_prompt_rows: int = 0
    has_trees: bool = False
    trees_fit: bool = False
    hurries: bool = False
    num_sampled: int | None = None

    @property
    def num_live_levels(self) -> int:
        return 0 if self.has_trees else self.num_live


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step computed. num_rows: that verified; num_keys: in the caches of their requests.

    num_levels: of the chains that it made. has_trees: it verified trees
    """

    num_requests: int
    num_rows: int
    num_prompt_rows: int
    num_levels: int
    num_keys: int
    has_trees: bool = False

    @property
    def kind(self) -> Kind:
        if self.has_trees:
            return Kind.TREE
        is_plain = self.num_levels == 0 and self.num_rows == self.num_requests
        return Kind.PLAIN if is_plain else Kind.CHAIN


@dataclass(slots=True, kw_only=True)
class PlannerStatistics:
    """Sums over the rounds observed; num_levels and num_probes over those planned.

    num_rows: last sampled tokens and drafts that were verified, without padding
    num_wasted: verified drafts that did not hold
    predicted_tokens, measured_tokens: of the rounds with drafts that had a prediction
    predicted_ms, measured_ms: of steps that followed one another without a pause
    num_tree_rounds: that verified trees
    """

    num_rounds: int = 0
    num_tree_rounds: int = 0
    num_rows: int = 0
    num_wasted: int = 0
    predicted_tokens: float = 0.0
    measured_tokens: int = 0
    num_levels: int = 0
    num_probes: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0

    def since(self, earlier: "PlannerStatistics") -> "PlannerStatistics":
        names = [field.name for field in fields(self)]
        return PlannerStatistics(**{n: getattr(self, n) - getattr(earlier, n) for n in names})

    @property
    def round_tokens(self) -> dict[str, int]:
        return {"predicted": round(self.predicted_tokens), "measured": self.measured_tokens}

    @property
    def tree_share(self) -> float:
        return self.num_tree_rounds / self.num_rounds if self.num_rounds else 0.0

    @property
    def wasted_share(self) -> float:
        return self.num_wasted / self.num_rows if self.num_rows else 0.0


class RowPlanner:
    """Chooses rows and levels for the most tokens per second, from the gains of recent rounds.

    The best fixed way to go on, (levels, rows), has a rate of tokens per millisecond. Drafts of
    this round exist already, maybe of another number of levels. By Dinkelbach's argument the
    largest ratio sum(tokens) / sum(time) is the one rate at which max(tokens - rate * time) is 0
    in total, and with the rate fixed that maximum splits into one of each round: this round takes
    the rows that bring the most tokens beyond rate * time, and the next levels are the steady ones.
    Prompts that ride in a step take rows of its tiles, so steps with them are choices of their own,
    and the best way to go on is that of the recent share of such steps, fewer where it has fewer
    tokens (RoundOptions). For up to MOST_STOPPING requests the same
    is asked of several thresholds at which drafts may stop, and the best of them is taken.
    Where no more requests come, the slowest decides when all have ended. Rows that go to drafts of
    the others make its steps longer, so time counts HURRY times as much. It also does while the
    prompts of a burst wait, which would wait longer with more drafts.
    Where the costs have those of trees, and trees are offered, the rate of rounds of trees is
    compared with that of the best way to go on without (tree_rounds.py); all nodes are verified.

    costs: milliseconds; measured or injected
    shapes: (requests, rows) that were captured. A step takes the shapes with the fewest requests
        that hold its own, of at least as many rows.
    num_levels: K, the most levels of the draft
    threshold: of mean path probabilities, below which drafts stop; None: the one that pays, where
        the costs say what a level costs after the stop
    """

    def __init__(
        self,
        costs: RoundCosts,
        shapes: Sequence[tuple[int, int]],
        num_levels: int,
        threshold: float | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels={num_levels}: a planner needs a draft of 1 level or more")
        self._costs = costs
        self._sizes = RowSizes(shapes)
        self.num_levels = num_levels
        self._thresholds = THRESHOLDS if threshold is None else (threshold,)
        if threshold is None and costs.skipped_ms is None:
            self._thresholds = (0.0,)
        self._history = RoundHistory(num_levels, _entries(self._sizes.most_requests))
        self._probes = Probes(num_levels)
        self._surprise = Surprise()
        self._trees: dict[int, TreeRounds] = {}  # by their levels
        self._estimate = Estimate([], [])  # that serves the latest plan; none yet
        self._of_few: dict[int, Estimate] = {}  # by the number that draft, up to FEW
        self._curves: GainCurves | None = None  # of the latest plan
        self._tree_curves: GainCurves | None = None  # of the latest trees
        self._threshold = self._thresholds[0]
        self._prompts = PromptLoad()
        self._ratios = TimeRatios()
        self._steady_levels = min(FIRST_LEVELS, num_levels)
        self._rate = 0.0  # tokens per millisecond of the latest plan
        self._num_rounds = 0  # with drafts, since all was forgotten
        self._next_fit = 1
        self._statistics = PlannerStatistics()
        self._num_planned_levels = 0

    @property
    def calibration(self) -> NDArray[np.floating[Any]]:
        """[2, K, 2] float32 (intercept, slope) for greedy and sampled requests, by level."""
        return self._history.calibration.coefficients

    @property
    def num_fits(self) -> int:
        return self._history.calibration.num_fits

    @property
    def threshold(self) -> float:
        """Return the threshold for the drafts that follow the latest planned round."""
        return self._threshold

    @property
    def statistics(self) -> PlannerStatistics:
        return replace(
            self._statistics,
            num_levels=self._num_planned_levels,
            num_probes=self._probes.num_probes,
        )

    def plan(self, coming: NextRound) -> RoundPlan:
        self._prompts.add(coming.num_prompt_rows)
        plan = self._plan(coming)
        self._num_planned_levels += plan.num_levels
        return plan

    def _plan(self, coming: NextRound) -> RoundPlan:
        num_live = coming.num_live_levels
        assert num_live <= self.num_levels, f"{num_live=} of {self.num_levels} levels"
        num_requests, num_drafting = requests = coming.requests
        rows = self._sizes.of(num_requests)
        if num_drafting == 0:
            return RoundPlan(int(rows[0]), 0)
        if coming.num_sampled in (0, num_drafting):
            self._keep_kind(num_drafting, is_sampled=coming.num_sampled > 0)
        if len(self._history) < LEAST_ENTRIES:
            self._steady_levels = min(FIRST_LEVELS, self.num_levels)
            self._threshold = self._thresholds[0]
            num_rows = _holding(rows, num_requests + num_drafting * num_live)
            return RoundPlan(num_rows, self._steady_levels)
        keys_ms = self._costs.ms_per_key * coming.num_keys
        options = self._options_of(requests, keys_ms)
        self._curves = options.curves
        self._threshold = options.curves.threshold
        self._steady_levels, best_rate = options.steady(keys_ms, self._rate)
        rate = self._rate = best_rate
        if coming.hurries and num_requests >= MANY:
            rate *= HURRY
            self._steady_levels = options.levels_at(rate, keys_ms)
        step = options.rounds
        if coming.num_prompt_rows:
            step = self._mixed(requests, coming.num_prompt_rows, options.curves)
        num_rows = self._num_rows(step, coming, rate)
        knows_chains = len(self._history) >= LEAST_ROUNDS * num_drafting
        if coming.trees_fit and self._costs.tree is not None and knows_chains:
            is_tree = self._chooses_trees(requests, keys_ms, best_rate)
            L, trees = self._trees_of(num_requests)
            if is_tree or trees.is_chosen:  # where they are chosen, chains are a probe
                return RoundPlan(num_rows, L if is_tree else self.num_levels, is_tree)
        levels = self._probes.levels(self._steady_levels, num_drafting)
        if levels == 0 and num_rows == step.rows[0]:  # it is priced as a plain round, so it is one
            num_rows = num_requests
        return RoundPlan(num_rows, levels)

    def _num_rows(self, step: StepOptions, coming: NextRound, rate: float) -> int:
        num_live, (num_requests, num_drafting) = coming.num_live_levels, coming.requests
        if num_live == 0:
            return int(step.rows[0])
        num_rows = step.best_rows(num_live, self._steady_levels, rate)
        if not self._probes.is_live:
            return num_rows
        return self._probes.rows(step.rows, num_rows, num_requests, num_drafting * num_live)

    def observe_plain(self, num_requests: int) -> None:
        self._count(num_requests, 0, 0, None)

    def observe(self, outcome: RoundOutcome, has_time: bool = True) -> None:
        """Learn from a round with drafts whose results were read.

        has_time: the GPU has other work meanwhile; else what takes long is left for later
        """
        num_requests = len(outcome.num_accepted)
        num_drafting = int(np.count_nonzero(outcome.num_allowed))
        num_verified = int(outcome.num_verified.sum())
        num_accepted = int(outcome.num_accepted.sum())
        assert outcome.confidences.shape == (num_requests, self.num_levels)
        assert num_accepted <= num_verified, f"{num_accepted=} of {num_verified} drafts verified"
        has_drafts = outcome.num_live > 0 and num_drafting > 0
        predicted = None
        if has_drafts and self._curves is not None:
            # drafts that stop have fewer rows where fewer hold: the mean curve has that in it
            has_all = self._curves.threshold > 0
            num_rows = outcome.num_live * num_drafting if has_all else num_verified
            predicted = self._curves.gain(outcome.num_live, num_rows, num_drafting)
            self._surprise.add(predicted, num_accepted, num_drafting, len(self._history))
        self._count(num_requests, num_verified, num_accepted, predicted)
        if has_drafts:
            self._keep(outcome, num_drafting, self._steady_levels == 0, has_time)

    def observe_trees(
        self, chains: RoundOutcome, num_verified: int, num_accepted: int, has_time: bool = True
    ) -> None:
        """Learn from a round of trees whose results were read.

        chains: what it shows of the chains in them. num_verified, num_accepted: nodes of all trees.
        has_time: see `observe`
        """
        num_requests = len(chains.num_accepted)
        num_drafting = int(np.count_nonzero(chains.num_allowed))
        self._statistics.num_tree_rounds += 1
        predicted = None
        if num_drafting and self._tree_curves is not None:
            L, trees = self._trees_of(num_requests)
            in_chains = self._tree_curves.gain(L, L * num_drafting, num_drafting)
            predicted = trees.held(in_chains, num_drafting)
            held = num_accepted, int(chains.num_accepted.sum())
            if trees.observe(*held, predicted, num_drafting, len(self._history)):
                self._forget()
                self._know_nothing()
        self._count(num_requests, num_verified, num_accepted, predicted)
        if num_drafting:
            self._keep(chains, num_drafting, False, has_time)

    def _keep(
        self, outcome: RoundOutcome, num_drafting: int, is_probe: bool, has_time: bool
    ) -> None:
        """Take what a round showed of chains into the estimates, now or a few rounds later."""
        self._history.add(outcome)
        self._num_rounds += 1
        is_early = self._num_rounds <= MERGE_EVERY and self._num_rounds.bit_count() == 1
        most = MERGE_EVERY if has_time else 2 * MERGE_EVERY
        if is_probe or is_early or self._history.num_pending >= most:
            self._learn(num_drafting, is_probe)

    def observe_time(self, step: StepSize, ms: float) -> None:
        predicted = self._step_ms(step)
        if predicted <= 0:
            return
        has_prompts = step.num_prompt_rows > 0
        self._ratios.add(step.num_requests, has_prompts, step.kind, ms / predicted)
        self._statistics.predicted_ms += predicted
        self._statistics.measured_ms += ms

    def _step_ms(self, step: StepSize) -> float:
        costs = self._costs
        ms = costs.ms_per_key * step.num_keys
        if step.has_trees:
            if self._tree_curves is None or costs.tree is None:
                return 0.0
            return ms + tree_ms(costs, step.num_requests, self._tree_curves, step.num_prompt_rows)
        if step.kind is Kind.PLAIN and step.num_prompt_rows == 0:
            return ms + costs.plain_ms(step.num_requests)
        num_run = float(step.num_levels)
        if step.num_levels and self._curves is not None:
            num_run = float(self._curves.levels_run[step.num_levels - 1])
        ms += (num_run - 1) * costs.level_ms(step.num_requests)  # one is in what follows
        if step.num_prompt_rows:
            return ms + costs.mixed_ms(step.num_rows + step.num_prompt_rows)
        return ms + costs.verify_ms(step.num_rows)

    def _count(
        self, num_requests: int, num_verified: int, num_accepted: int, predicted: float | None
    ) -> None:
        self._prompts.add_tokens(num_requests + num_accepted, num_requests)
        sums = self._statistics
        sums.num_rounds += 1
        sums.num_rows += num_requests + num_verified
        sums.num_wasted += num_verified - num_accepted
        if predicted is not None:
            sums.predicted_tokens += num_requests + predicted
            sums.measured_tokens += num_requests + num_accepted

    def _learn(self, num_drafting: int, is_probe: bool) -> None:
        """Take the new rounds into the estimates; forget the old ones if the draft has changed."""
        if self._surprise.has_changed(is_probe):
            self._forget()
            if is_probe:
                self._probes.again()
        self._history.merge(400 + 4 * num_drafting)
        for each in self._of_few.values():
            each.age += 1
        self._of_few = {n: each for n, each in self._of_few.items() if each.age < MOST_AGE}
        if is_probe or self._num_rounds >= self._next_fit:
            self._history.calibration.fit()
            is_early = self._num_rounds < EARLY_ROUNDS
            self._next_fit = self._num_rounds + (1 if is_early else FIT_EVERY)
        self._estimate_anew(num_drafting)

    def _keep_kind(self, num_drafting: int, is_sampled: bool) -> None:
        if self._history.keep_kind(is_sampled):
            self._num_rounds = self._next_fit = 1  # the next ones count at once
            self._of_few.clear()
            if len(self._history) >= LEAST_ENTRIES:
                self._estimate_anew(num_drafting)
            else:
                self._know_nothing()

    def _know_nothing(self) -> None:
        self._curves = self._tree_curves = None

    def _forget(self) -> None:
        self._history.forget()
        self._of_few.clear()
        self._num_rounds = self._next_fit = 1

    def _chooses_trees(self, requests: RequestCounts, keys_ms: float, other_rate: float) -> bool:
        """Whether the next drafts are trees. other_rate: of the best way to go on without."""
        # their levels cost more than those of chains: they may stop at another threshold
        rates = [self._tree_rate(requests, each, keys_ms) for each in self._estimate.trees]
        best = rates.index(max(rates))
        self._estimate.trees = [self._estimate.trees[best]]
        _, trees = self._trees_of(requests.num_requests)
        is_tree = trees.choose(rates[best], other_rate, self._steady_levels > 0)
        if is_tree:
            self._tree_curves = self._estimate.trees[0]
            self._threshold = self._tree_curves.threshold
        return is_tree

    def _tree_rate(self, requests: RequestCounts, curves: GainCurves, keys_ms: float) -> float:
        """Tokens per millisecond of rounds of trees, as `RoundOptions.steady` has it of others."""
        n, num_drafting = requests
        L, trees = self._trees_of(n)
        tokens = n + trees.held(curves.gain(L, L * num_drafting, num_drafting), num_drafting)
        riding = self._riding(n)
        ms = self._ratios.of_trees(n, False) * tree_ms(self._costs, n, curves, 0)
        if riding.share:
            with_prompts = tree_ms(self._costs, n, curves, riding.num_rows)
            mixed = with_prompts - self._prompts_ms(n, riding.num_rows)
            share = float(riding.share_beside(np.array(tokens)))
            ms += share * (self._ratios.of_trees(n, True) * max(mixed, 0.0) - ms)
        return tokens / max(ms + keys_ms, 1e-6)

    def _trees_of(self, num_requests: int) -> tuple[int, TreeRounds]:
        assert self._costs.tree is not None, "costs of chains"
        num_levels = self._costs.tree.shape.of(num_requests).num_levels
        if num_levels not in self._trees:
            self._trees[num_levels] = TreeRounds(num_levels)
        return num_levels, self._trees[num_levels]

    def _estimate_anew(self, num_drafting: int) -> None:
        path_probs, own_paths = self._history.path_probs(_entries(num_drafting))
        thresholds = self._thresholds if num_drafting <= MOST_STOPPING else self._thresholds[:1]
        curves = GainCurves(path_probs, num_drafting)
        chains = [curves.at(each) for each in thresholds]
        trees = []
        if self._costs.tree is not None:  # which stop by the draft's own probabilities
            curves = GainCurves(path_probs, num_drafting, own_paths=own_paths)
            trees = [curves.at(each) for each in thresholds]
        made = Estimate(chains, trees)
        if num_drafting <= FEW:
            self._of_few[num_drafting] = made
        self._serve_by(made)

    def _serve_by(self, estimate: "Estimate") -> None:
        self._estimate = estimate
        self._curves = _same_threshold(estimate.chains, self._curves)
        if estimate.trees:
            self._tree_curves = _same_threshold(estimate.trees, self._tree_curves)

    def _options_of(self, requests: RequestCounts, keys_ms: float) -> RoundOptions:
        """With the threshold that pays most for contexts about as long."""
        num_drafting = requests.num_drafting
        if not self._estimate.serves(num_drafting):
            if num_drafting in self._of_few:
                self._serve_by(self._of_few[num_drafting])
            else:
                self._estimate_anew(num_drafting)
        eighths, prompt_rows = self._prompts.rounded
        half_round = self._costs.plain_ms(requests.num_requests) / 2
        num_halves = round(keys_ms / half_round)
        n = requests.num_requests
        ratios = *self._ratios.of(n, False), *self._ratios.of(n, True)
        load = (eighths, prompt_rows, self._prompts.tokens) if eighths else ()
        key = *requests, *load, num_halves, *ratios
        known = self._estimate.options
        if key not in known:
            best = self._best_threshold(requests, num_halves * half_round)
            self._estimate.chains = [best]
            known[key] = self._options_with(best, requests)
        return known[key]

    def _best_threshold(self, requests: RequestCounts, keys_ms: float) -> GainCurves:
        """Choose a threshold, judging each by rounds that verify all drafts, as few requests do.

        Other numbers of rows are looked at only for the best one: for all, it would take half a
        step.
        """
        chains = self._estimate.chains
        if len(chains) == 1:
            return chains[0]
        n, num_drafting = requests
        sizes = self._sizes.of(n)
        rows = [_holding(sizes, n + num_drafting * L) for L in range(1, self.num_levels + 1)]
        verify_ms = np.array([self._costs.verify_ms(each) for each in rows])
        _, ratio = self._ratios.of(n, False)

        def rate(curves: GainCurves) -> float:
            ms = ratio * (verify_ms + levels_ms(self._costs, n, curves)) + keys_ms
            return float(((n + num_drafting * curves.means) / ms).max())

        return max(chains, key=rate)

    def _options_with(self, curves: GainCurves, requests: RequestCounts) -> RoundOptions:
        n = requests.num_requests
        rounds = round_options(self._costs, self._sizes.of(n), curves, requests)
        riding = self._riding(n)
        if n < FILLING or riding.share == 0:
            mixed = self._mixed(requests, riding.num_rows, curves)
        else:
            mixed = filling_options(self._costs, rounds, self._ratios.of(n, True), riding)
        rounds = rounds.scaled(self._ratios.of(n, False))
        return RoundOptions(rounds, mixed, curves, riding)

    def _riding(self, num_requests: int) -> Riding:
        eighths, prompt_rows = self._prompts.rounded
        return Riding(eighths / 8, prompt_rows, num_requests * self._prompts.tokens)

    def _prompts_ms(self, num_requests: int, num_prompt_rows: int) -> float:
        """Price rows of prompts beside a row for each request, by the costs alone."""
        costs = self._costs
        return costs.mixed_ms(num_requests + num_prompt_rows) - costs.mixed_ms(num_requests)

    def _mixed(
        self, requests: RequestCounts, num_prompt_rows: int, curves: GainCurves
    ) -> StepOptions:
        most = int(self._sizes.of(requests.num_requests)[-1])
        n = requests.num_requests
        mixed = mixed_options(self._costs, most, curves, requests, num_prompt_rows)
        mixed = mixed.less(self._prompts_ms(n, num_prompt_rows))
        return mixed.scaled(self._ratios.of(n, True))


@dataclass(slots=True)
class Estimate:
    """What rounds of a number of drafting requests bring.

    A few requests are one fewer with each that ends, and one more when the next begins:
    the estimate for that number serves again, while there are not many new rounds.

    chains, trees: by threshold, until it is known which pays, and then those of that one; without
    costs of trees there are none. options: by all that they depend on beside. age: times that new
    rounds were taken in since
    """

    chains: list[GainCurves]
    trees: list[GainCurves]
    options: dict[tuple[float, ...], RoundOptions] = field(default_factory=dict)
    age: int = 0

    def serves(self, num_drafting: int) -> bool:
        return FEW * abs(self.chains[0].num_requests - num_drafting) <= num_drafting


class PromptLoad:
    """Running averages: the share of steps in which prompts ride, and how many rows of them.

    And of what brings them: the tokens of a step.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._rows = 0.0
        self._tokens = 1.0

    def add(self, num_rows: int) -> None:
        self._share += PROMPT_MEMORY * ((num_rows > 0) - self._share)
        if num_rows:
            weight = PROMPT_MEMORY if self._rows else 1.0
            self._rows += weight * (num_rows - self._rows)

    def add_tokens(self, num_tokens: int, num_requests: int) -> None:
        self._tokens += PROMPT_MEMORY * (num_tokens / num_requests - self._tokens)

    @property
    def tokens(self) -> float:
        """Tokens of each request that verified, to an eighth."""
        return round(8 * self._tokens) / 8

    @property
    def rounded(self) -> tuple[int, int]:
        """Eighths of the steps, and rows to the next multiple of 32."""
        return round(8 * self._share), 32 * -(-round(self._rows) // 32)


def _same_threshold(candidates: list[GainCurves], old: GainCurves | None) -> GainCurves:
    same = (each for each in candidates if old is not None and each.threshold == old.threshold)
    return next(same, candidates[0])


def _entries(num_requests: int) -> int:
    return max(256, 2 * num_requests)


def _holding(rows: NDArray[np.integer[Any]], num_rows: int) -> int:
    """The smallest size that holds these rows, or the largest of all."""
    return int(rows[min(int(np.searchsorted(rows, num_rows)), len(rows) - 1)])
