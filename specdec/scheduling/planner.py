"""How many rows verify in the next round, and what is drafted after it.

    planner = Planner(costs, shapes, num_levels=8)
    plan = planner.plan(NextRound(...))         the round is launched with this plan
    planner.observe(outcome)                    its results were read

A round is launched before the last one is read, so the choice rests on what recent rounds showed.
It changes when tokens come, never which: any choice is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specdec.scheduling.costs import StepCosts, StepKind
from specdec.scheduling.gains import Floats, GainCurve
from specdec.scheduling.history import LEAST_ENTRIES, Histories
from specdec.scheduling.outcomes import RoundOutcome
from specdec.scheduling.probes import Probes
from specdec.scheduling.statistics import PlannerStatistics
from specdec.scheduling.ways import FEW, Load, PromptLoad, Way, Ways, index_of
from specdec.sizes import PLAIN, DraftShape, chain

FIRST_LEVELS = 3  # while nothing is known
ENTRIES = 256  # of requests and rounds that are remembered; at least two rounds of the most
NEARLY = 0.995  # of the best rate: what is enough, with fewer levels


class RoundPlan(NamedTuple):
    """num_rows: that verify: of the captured sizes, or, where prompts ride, any number; in a plain
    round one for each request. next_shape: what each request drafts after it
    """

    num_rows: int
    next_shape: DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRound:
    """What a plan is made for.

    num_requests: that verify. num_drafting: those of them that may draft at all
    live: what was drafted by the step before; PLAIN: there are no drafts
    num_keys: in the caches of the requests
    num_prompt_rows: that will ride
    tree: what may be drafted next, beside chains; None: chains alone
    num_sampled: of the requests that may draft; None: not known. Where all are greedy, or all
        sampled, rounds of the other kind say nothing about them
    """

    num_requests: int
    num_drafting: int
    live: DraftShape
    num_keys: int
    num_prompt_rows: int = 0
    tree: DraftShape | None = None
    num_sampled: int | None = None

    @property
    def kind(self) -> int | None:
        """0: all are greedy. 1: all are sampled. None: there are both, or it is not known."""
        if self.num_sampled == 0:
            return 0
        return 1 if self.num_sampled == self.num_drafting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step computed. num_rows: that verified; num_keys: in the caches of their requests.

    shape: of the drafts that it verified, which were made in the same time
    """

    num_requests: int
    num_rows: int
    num_prompt_rows: int
    num_keys: int
    shape: DraftShape


class Planner:
    """Chooses shapes and rows for the most tokens per millisecond, by what recent rounds showed.

    The next drafts are of the shape with the best rate. Drafts that exist may be of another one:
    their round takes the rows that bring the most tokens beyond rate * time, since time that it
    saves is worth the best rate. Every now and then a few rounds probe a shape that was not chosen.

    costs: milliseconds; measured or injected
    sizes, threshold: see Ways
    num_levels: K, the most levels of a chain
    """

    def __init__(
        self,
        costs: StepCosts,
        sizes: Sequence[tuple[int, int]],
        num_levels: int,
        threshold: float | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels={num_levels}: a planner needs a draft of 1 level or more")
        self._costs = costs
        self.num_levels = num_levels
        self._ways = Ways(costs, sizes, threshold)
        self.threshold = self._ways.of_many  # for the drafts after the latest planned round
        capacity = max(ENTRIES, 2 * self._ways.most_requests)
        self._histories = Histories(num_levels, capacity)
        self._probes = Probes()
        self._prompts = PromptLoad()
        # until more is learned
        self._estimates: dict[tuple[DraftShape, int | None, int], list[GainCurve]] = {}
        self._known: dict[tuple[object, ...], list[Way]] = {}  # for a few plans
        self._num_plans = 0  # for which they have served
        self._best = Way(PLAIN, 0.0)  # of the latest plan
        self._curves: dict[int, GainCurve] = {}  # of the latest plan, by the width of drafts
        self._pending: list[RoundOutcome] = []  # of which nothing was learned yet
        self._num_drafted = self._num_plain = 0  # rounds since something was learned
        self._statistics = PlannerStatistics()

    @property
    def factors(self) -> Floats:
        """[2, K] by which the odds of a chain's drafts are multiplied, greedy and sampled."""
        return self._histories.chains.factors.values

    @property
    def statistics(self) -> PlannerStatistics:
        rounds, num_probes = self._statistics.rounds.copy(), self._probes.num_probes
        return replace(self._statistics, rounds=rounds, num_probes=num_probes)

    def plan(self, coming: NextRound) -> RoundPlan:
        self._prompts.add(coming.num_prompt_rows)
        self._num_plans += 1
        if self._num_plans > LEAST_ENTRIES:
            self._forget_ways()
        plan = self._plan(coming)
        self._statistics.num_levels += plan.next_shape.levels
        return plan

    def _plan(self, coming: NextRound) -> RoundPlan:
        n, live = coming.num_requests, coming.live
        rows, _ = self._ways.rounds(n)
        if coming.num_drafting == 0:
            return RoundPlan(int(rows[0]), PLAIN)
        if not self._histories.know(chain(1), coming.kind):
            self.threshold = self._ways.of_many
            num_rows = n * live.rows
            if live.width == 1:
                num_rows = int(rows[index_of(rows, n + coming.num_drafting * live.levels)])
            lengths = self._costs.chain_lengths(self.num_levels)
            return RoundPlan(num_rows, chain(_at_least(FIRST_LEVELS, lengths)))
        ways = self._ways_of(coming)
        best_rate = max(way.rate for way in ways)
        self._best = next(way for way in ways if way.rate >= NEARLY * best_rate)
        num_rows = self._num_rows(coming, best_rate)
        shape, _, curve = self._probed(coming, ways) or self._best
        self.threshold = self._ways.of_many if curve is None else curve.threshold
        if shape == PLAIN and num_rows == rows[0]:  # it is priced as a plain round, so it is one
            num_rows = n
        return RoundPlan(num_rows, shape)

    def _ways_of(self, coming: NextRound) -> list[Way]:
        """List all ways to go on, those with fewer levels first. Contexts count in half rounds."""
        n, num_drafting, kind = coming.num_requests, coming.num_drafting, coming.kind
        tree = self._tree(coming)
        if tree is not None and not self._histories.know(tree, kind):
            tree = None
        key = n, num_drafting, kind, tree
        if key not in self._known:
            half_ms = self._costs.plain_ms(n) / 2
            keys_ms = half_ms * round(self._costs.ms_per_key * coming.num_keys / half_ms)
            load = Load(n, num_drafting, keys_ms, self._prompts.share, self._prompts.num_rows)
            curves = self._curves_of(chain(1), kind, num_drafting)
            ways = [self._ways.plain(load), *self._ways.chains(curves, load)]
            if tree is not None:
                curves = self._curves_of(tree, kind, num_drafting)
                easier = self._easier(tree, kind, num_drafting)
                ways.append(self._ways.trees(tree, curves, load, easier))
            self._known[key] = sorted(ways, key=lambda way: way.shape.levels)
        ways = self._known[key]
        self._curves = {way.shape.width: way.curve for way in ways if way.curve is not None}
        return ways

    def _curves_of(self, shape: DraftShape, kind: int | None, num_drafting: int) -> list[GainCurve]:
        """Return what drafts of a shape bring; many requests have the curves of almost as many."""
        num_similar = num_drafting - num_drafting % max(num_drafting // FEW, 1)
        key = shape, kind, num_similar
        if key not in self._estimates:
            sample = self._histories.of(shape).sample(kind, num_similar)
            self._estimates[key] = self._ways.curves(sample, num_drafting)
        return self._estimates[key]

    def _easier(self, tree: DraftShape, kind: int | None, num_drafting: int) -> float:
        """Compare what chains bring now to what they would have brought where trees ran.

        Those may have been other requests: the last ones of a burst are the hard ones.
        """
        beside = self._histories.of_chains_in(tree)
        if beside.num_known(kind) < LEAST_ENTRIES:
            return 1.0
        curve = self._curves_of(chain(1), kind, num_drafting)[0]
        key = tree, kind, -num_drafting  # trees themselves have the positive number
        if key not in self._estimates:
            sample = beside.sample(kind, num_drafting)
            self._estimates[key] = [GainCurve(sample, curve.threshold)]
        of_both = self._estimates[key][0], curve
        then, now = (float(each.means[tree.levels - 1]) for each in of_both)
        return min(max(now / then, 1 / 2), 2.0) if then > 0 else 1.0

    def _num_rows(self, coming: NextRound, rate: float) -> int:
        """Choose rows that bring the most beyond what their time is worth at `rate`."""
        n, num_drafting, live = coming.num_requests, coming.num_drafting, coming.live
        if live.width > 1:
            return n * live.rows
        rows, ms = self._ways.rounds(n)
        if live == PLAIN:
            return int(rows[0])
        if coming.num_prompt_rows:
            rows, ms = self._ways.rounds_with(n, coming.num_prompt_rows)
        ms = self._ways.times.ms(StepKind(n, coming.num_prompt_rows > 0, live), ms)
        values = self._curves[1].gains(live.levels, rows - n, num_drafting) - rate * ms
        if self._best.shape == PLAIN and not coming.num_prompt_rows:
            values[0] += rate * (ms[0] - self._ways.plain_ms(n))
        best = int(values.argmax())
        if self._probes.is_live:
            num_probed = min(num_drafting * live.levels, LEAST_ENTRIES)
            best = max(best, index_of(rows, n + num_probed))
        return int(rows[best])

    def _probed(self, coming: NextRound, ways: list[Way]) -> Way | None:
        """Return a way that is not the best one, if it is time to look at it.

        Instead of plain rounds that is a chain. Of trees nothing may be known yet; their rounds
        show what chains would bring, so beside them there is nothing to look at.
        """
        tree, best = self._tree(coming), self._best.shape
        pays = best != PLAIN
        if tree is not None and pays and not self._histories.know(tree, coming.kind):
            return Way(tree, 0.0)
        is_due = self._probes.is_due(pays, coming.num_drafting)
        if not is_due or best.width > 1:
            return None
        chains = [way for way in ways if way.shape.width == 1]
        other = max(chains, key=lambda way: way.rate)
        if best.width == 1:  # from plain rounds two levels, else one more, or the next block
            length = _at_least(max(best.levels + 1, 2), [way.shape.levels for way in chains])
            other = next(way for way in chains if way.shape.levels == length)
        others = [other, *(way for way in ways if way.shape == tree and pays)]
        others = [way for way in others if way.shape not in (best, PLAIN)]
        return others[self._probes.num_begun % len(others)] if others else None

    def observe_plain(self, num_requests: int) -> None:
        self._num_plain += 1
        self._statistics.rounds[PLAIN] += 1
        self._count(num_requests, 0, 0, None)

    def observe(self, outcome: RoundOutcome, has_time: bool = True) -> None:
        """Learn from a round with drafts whose results were read.

        has_time: the GPU has other work meanwhile; else what takes long is left for later
        """
        num_verified = int(outcome.num_verified.sum())
        num_accepted = int(outcome.num_accepted.sum())
        assert num_accepted <= num_verified, f"{num_accepted=} of {num_verified} drafts verified"
        self._statistics.rounds[outcome.shape] += 1
        predicted = self._predicted(outcome, num_verified)
        self._count(len(outcome.num_accepted), num_verified, num_accepted, predicted)
        if not outcome.num_allowed.any():
            return
        self._num_drafted += 1
        self._pending.append(outcome)
        most = LEAST_ENTRIES if has_time else 2 * LEAST_ENTRIES
        is_probe = self._best.shape == PLAIN
        if is_probe or len(self._pending) >= most or not self._histories.know(outcome.shape, None):
            self._learn()

    def _predicted(self, outcome: RoundOutcome, num_verified: int) -> float | None:
        curve = self._curves.get(outcome.shape.width)
        num_drafting = int(np.count_nonzero(outcome.num_allowed))
        if curve is None or num_drafting == 0:
            return None
        levels = min(outcome.shape.levels, len(curve.means))
        # where drafts stop, fewer have a row: the mean of all rounds has that in it
        has_all = outcome.shape.width > 1 or curve.threshold > 0
        num_rows = levels * num_drafting if has_all else num_verified
        return float(curve.gains(levels, num_rows, num_drafting))

    def observe_time(self, step: StepSize, ms: float, host_ms: float) -> None:
        """host_ms: of a step's milliseconds, in which the host did not wait for results"""
        predicted = self._step_ms(step)
        kind = StepKind(step.num_requests, step.num_prompt_rows > 0, step.shape)
        self._ways.times.add(kind, predicted, ms, host_ms)
        self._statistics.predicted_ms += predicted
        self._statistics.measured_ms += ms

    def _step_ms(self, step: StepSize) -> float:
        costs, n, shape = self._costs, step.num_requests, step.shape
        keys_ms = costs.ms_per_key * step.num_keys
        if shape == PLAIN and step.num_rows == n and step.num_prompt_rows == 0:
            return keys_ms + costs.plain_ms(n)
        curve = self._curves.get(shape.width)
        num_run = float(shape.levels)
        if curve is not None and shape != PLAIN:
            num_run = float(curve.levels_run[min(shape.levels, len(curve.means)) - 1])
        num_rows = step.num_rows + step.num_prompt_rows
        ms = costs.mixed_ms(num_rows) if step.num_prompt_rows else costs.round_ms(num_rows)
        return ms + keys_ms + costs.drafts_ms(shape, n, num_run)

    def _count(
        self, num_requests: int, num_verified: int, num_accepted: int, predicted: float | None
    ) -> None:
        sums = self._statistics
        sums.num_rows += num_requests + num_verified
        sums.num_wasted += num_verified - num_accepted
        if predicted is not None:
            sums.predicted_tokens += num_requests + predicted
            sums.measured_tokens += num_requests + num_accepted

    def _learn(self) -> None:
        self._histories.age(self._num_drafted, self._num_plain)
        self._histories.add(self._pending)
        self._pending.clear()
        self._num_drafted = self._num_plain = 0
        self._estimates.clear()
        self._forget_ways()

    def _forget_ways(self) -> None:
        self._known.clear()
        self._num_plans = 0

    def _tree(self, coming: NextRound) -> DraftShape | None:
        return None if self._costs.tree is None else coming.tree


def _at_least(num_levels: int, lengths: Sequence[int]) -> int:
    """Take the first of ascending lengths that has these levels, or the last."""
    return next((each for each in lengths if each >= num_levels), lengths[-1])
