"""What the results of steps tell the planner, and what it tells the device.

A round is described when its results are read, and told once the next step has been launched, so
that the planner learns beside it.
"""

import itertools
import time

import numpy as np

from specdec.requests.draft_tree import depths, first_children
from specdec.requests.request import Request
from specdec.rounds.results import PendingResult, StepResult
from specdec.runner import Runner
from specdec.scheduling.gains import Booleans, Floats, Integers
from specdec.scheduling.history import RoundOutcome
from specdec.scheduling.planner import Planner, StepSize
from specdec.scheduling.work import Work
from specdec.sizes import PLAIN, DraftShape, chain


class Feedback:
    """Stands between a planner and the steps of an engine."""

    def __init__(self, planner: Planner, runner: Runner) -> None:
        self._planner = planner
        self._runner = runner
        self._factors = planner.factors  # that the device has
        self._untold: list[RoundOutcome | int] = []  # of rounds without drafts, how many requests
        self._read_at = 0.0  # when the latest result was read, by time.perf_counter()
        self._read: PendingResult | None = None  # that result
        self._waited = 0.0  # seconds that the host had waited for results until then

    def prepare(self) -> None:
        """Let the next step stop its drafts where the planner says."""
        self._runner.stop_below(self._planner.threshold)

    def observe(
        self, work: Work, pending: PendingResult, result: StepResult, launched_at: float
    ) -> None:
        """Keep what a round showed, before its requests get their tokens.

        launched_at: by time.perf_counter()
        """
        shape = _verified_shape(work)
        self._observe_time(work, shape, pending, launched_at)
        if not work.verifying:
            return
        if shape == PLAIN:
            self._untold.append(len(work.verifying))
            return
        self._untold.append(self._outcome(work, shape, result))

    def learn(self, has_time: bool) -> None:
        """Tell the planner of the rounds that were read.

        has_time: a step runs beside it. Else the engine may pause, and no step is timed by the
        latest result: steps in flight may be read late
        """
        if not has_time:
            self._read_at = 0.0
        untold, self._untold = self._untold, []
        for each in untold:
            if isinstance(each, int):
                self._planner.observe_plain(each)
            else:
                self._planner.observe(each, has_time)
        if self._planner.factors is not self._factors:
            self._factors = self._planner.factors
            self._runner.calibrate(self._factors)

    def _observe_time(
        self, work: Work, shape: DraftShape, pending: PendingResult, launched_at: float
    ) -> None:
        """Time a step from one result to the next, if it was launched before the first was read.

        In this time the drafts that it verifies were made, and its target ran. The device's clock
        tells it: the host may read a result late, while it launches another step.
        """
        before, self._read_at = self._read_at, time.perf_counter()
        waited, self._waited = self._waited, pending.waits.seconds
        earlier, self._read = self._read, pending
        if not work.verifying or launched_at > before:
            return
        size = StepSize(
            num_requests=len(work.verifying),
            num_rows=work.num_verify_rows,
            num_prompt_rows=sum(part.length for part in work.parts),
            shape=shape,
            num_keys=sum(request.num_tokens for request in work.verifying),
        )
        on_device = None if earlier is None else pending.ms_after(earlier)
        on_host = 1e3 * (self._read_at - before)
        if on_device is None:  # then steps do not overlap with the host's work
            self._planner.observe_time(size, on_host, 0.0)
        else:
            self._planner.observe_time(size, on_device, on_host - 1e3 * (self._waited - waited))

    def _outcome(self, work: Work, shape: DraftShape, result: StepResult) -> RoundOutcome:
        requests = work.verifying
        B = len(requests)
        runs = np.array([request.finish is None for request in requests])
        bound = self._runner.sizes.max_model_len
        # [B, X]: chains have as many levels as they may have
        num_nodes = shape.nodes if shape.is_wide else self._planner.num_levels
        return outcome_of(
            shape,
            result.path_probs[:B, :num_nodes],
            result.draft_parents[:B] if shape.is_wide else None,
            num_verified=np.array([len(drafts) for drafts in result.draft_tokens[:B]]) * runs,
            num_accepted=np.array(result.num_accepted[:B]) * runs,
            num_allowed=np.array([num_drafted(each, bound) for each in requests]) * runs,
            is_sampled=np.array([request.params.temperature > 0 for request in requests]),
            threshold=self._planner.threshold,
            num_on_chains=_num_on_chains(result, B) * runs if shape.is_wide else None,
        )


def num_drafted(request: Request, max_model_len: int) -> int:
    """Count this round's drafts: as many as fit into the context after the last token."""
    return min(request.num_speculative_tokens, max_model_len - request.num_tokens)


def outcome_of(
    shape: DraftShape,
    probs_BX: Floats,
    parents: list[list[int]] | None,
    *,
    num_verified: Integers,
    num_accepted: Integers,
    num_allowed: Integers,
    is_sampled: Booleans,
    threshold: float,
    num_on_chains: Integers | None = None,
) -> RoundOutcome:
    """Describe a round to the planner, by levels.

    probs_BX: path probabilities of live nodes; 0: not live. Of chains X is the most levels
    parents: the row of each node's parent; None: chains
    threshold: below which the drafts stopped
    num_on_chains: of trees, the drafts that held and were the best ones of their parents
    """
    probs_BX = np.clip(np.nan_to_num(probs_BX), 0.0, 1.0)
    if parents is None:
        held: Floats = np.where(np.arange(probs_BX.shape[1]) < shape.levels, probs_BX, 0.0)
        best, num_run, num_shown = held, int((held > 0).sum(axis=1).max()), num_verified
    else:
        held, best = _by_levels(probs_BX, parents, shape.levels)
        num_run = _last_level(best, threshold, num_allowed)
        num_shown = np.minimum(num_run, num_allowed)
    is_allowed = np.arange(held.shape[1]) < num_allowed[:, None]
    chains = None
    if parents is not None and num_on_chains is not None:
        paths = _chain_paths(probs_BX, parents, shape.levels) * is_allowed
        chains = RoundOutcome(
            shape=shape,
            held=paths,
            best=paths,
            num_run=num_run,
            num_shown=(paths > 0).sum(axis=1),
            num_verified=num_verified,
            num_accepted=num_on_chains,
            num_allowed=num_allowed,
            is_sampled=is_sampled,
        )
    return RoundOutcome(
        shape=shape,
        held=held * is_allowed,
        best=best * is_allowed,
        num_run=num_run,
        num_shown=num_shown,
        num_verified=num_verified,
        num_accepted=num_accepted,
        num_allowed=num_allowed,
        is_sampled=is_sampled,
        chains=chains,
    )


def _by_levels(
    probs_BX: Floats, parents: list[list[int]], num_levels: int
) -> tuple[Floats, Floats]:
    """Sum the nodes of each level [B, num_levels], and find the most probable of each.

    Of a level without nodes no path is more probable than the least probable node.
    """
    held, best = ([[0.0] * num_levels for _ in parents] for _ in range(2))
    for b, (probs, of_tree) in enumerate(zip(probs_BX.tolist(), parents, strict=True)):
        for prob, depth in zip(probs, depths(of_tree)[1:], strict=False):
            held[b][depth - 1] += prob
            best[b][depth - 1] = max(best[b][depth - 1], prob)
        least = min(probs[: len(of_tree)], default=0.0)
        best[b] = [prob or least for prob in best[b]]
    return np.array(held), np.array(best)


def _chain_paths(probs_BX: Floats, parents: list[list[int]], num_levels: int) -> Floats:
    """List the paths of the chains in trees [B, num_levels]: of each node the first child."""
    paths = np.zeros((len(parents), num_levels))
    for b, of_tree in enumerate(parents):
        for depth, row in enumerate(first_children(of_tree)[:num_levels]):
            paths[b, depth] = probs_BX[b, row - 1]
    return paths


def _num_on_chains(result: StepResult, num_requests: int) -> Integers:
    """Count the drafts that held and that chains would have had too."""
    found = []
    for b in range(num_requests):
        rows = first_children(result.draft_parents[b])
        best = [result.draft_tokens[b][row - 1] for row in rows]
        equal = map(int.__eq__, best, result.sampled_tokens[b][: result.num_accepted[b]])
        found.append(sum(itertools.takewhile(bool, equal)))
    return np.array(found)


def _last_level(best_BL: Floats, threshold: float, num_allowed: Integers) -> int:
    """Find the last level that a round's trees drafted together.

    They went on where the most probable paths of the level before were probable enough on average.
    """
    num_levels = best_BL.shape[1]
    votes = num_allowed[:, None] > np.arange(1, num_levels)
    num_voting = votes.sum(axis=0)
    goes_on = (best_BL[:, :-1] * votes).sum(axis=0) >= threshold * num_voting
    return 1 + int((goes_on & (num_voting > 0)).cumprod().sum())


def _verified_shape(work: Work) -> DraftShape:
    return work.shape if work.shape.is_wide else chain(work.num_live)
