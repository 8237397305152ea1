"""What the results of steps tell the planner: how long they took, and which drafts held.

A round is described when its results are read, and told once the next step has been launched, so
that the planner learns beside it. From a round of trees is read what chains would have shown.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from specdec.requests.draft_tree import depths, first_children
from specdec.requests.request import Request
from specdec.rounds.results import PendingResult, StepResult
from specdec.runner import Runner
from specdec.scheduling.round_history import IMPROBABLE, RoundOutcome
from specdec.scheduling.row_planner import RowPlanner, StepSize
from specdec.scheduling.work import Work
from specdec.sizes import TreeShape

# tells the planner of a round; the argument: whether the GPU has other work meanwhile
Observation: TypeAlias = Callable[[bool], None]


class Feedback:
    """Tells a planner what an engine's steps have shown, and the device of a new calibration."""

    def __init__(self, planner: RowPlanner, runner: Runner) -> None:
        self._planner = planner
        self._runner = runner
        self._num_fits = 0  # fits of the planner that the device has
        self._observations: list[Observation] = []  # of results that were read
        self._read_at = 0.0  # when the latest result was read, by time.perf_counter()
        self._read: PendingResult | None = None  # that result

    def forget(self) -> None:
        """Drop what was not told yet."""
        self._observations.clear()

    def pause(self) -> None:
        """Time no step by the latest result: after a pause, steps in flight may be read late."""
        self._read_at = 0.0

    def observe_time(self, work: Work, result: PendingResult, launched_at: float) -> None:
        """Time a step from one result to the next, if it was launched before the first was read.

        In this time the draft's levels of the step before ran, and the target of this one. The
        device's clock tells it: the host may read a result late, while it launches another step.
        launched_at: by time.perf_counter()
        """
        before, self._read_at = self._read_at, time.perf_counter()
        earlier, self._read = self._read, result
        if not work.verifying or launched_at > before:
            return
        if work.next_shape.is_wide and not work.shape.is_wide:
            return  # the levels that ran before it are not those that it makes
        size = StepSize(
            num_requests=len(work.verifying),
            num_rows=work.num_verify_rows,
            num_prompt_rows=sum(part.length for part in work.parts),
            num_levels=work.next_shape.levels,
            num_keys=sum(request.num_tokens for request in work.verifying),
            has_trees=work.shape.is_wide,
        )
        on_device = None if earlier is None else result.ms_after(earlier)
        on_host = 1e3 * (self._read_at - before)
        self._planner.observe_time(size, on_host if on_device is None else on_device)

    def observe(self, work: Work, result: StepResult) -> None:
        """Keep what a round showed, before its requests get their tokens."""
        if work.verifying:
            self._observations.append(self._observation(work, result))

    def learn(self, has_time: bool) -> None:
        """Tell the planner of the rounds that were read. has_time: a step runs beside it."""
        observations, self._observations = self._observations, []
        if not observations:
            return
        for observe in observations:
            observe(has_time)
        if self._planner.num_fits != self._num_fits:
            self._num_fits = self._planner.num_fits
            self._runner.calibrate(self._planner.calibration)

    def _observation(self, work: Work, result: StepResult) -> Observation:
        planner, requests = self._planner, work.verifying
        B = len(requests)
        if not work.shape.is_wide and work.num_live == 0:
            return lambda has_time: planner.observe_plain(B)
        runs = np.array([request.finish is None for request in requests])
        is_sampled = np.array([request.params.temperature > 0 for request in requests])
        num_verified = np.array([len(drafts) for drafts in result.draft_tokens[:B]]) * runs
        num_accepted = np.array(result.num_accepted[:B]) * runs
        bound = self._runner.sizes.max_model_len
        num_allowed = np.array([num_drafted(each, bound) for each in requests]) * runs
        if not work.shape.is_wide:
            chains = RoundOutcome(
                confidences=result.confidences[:B],
                num_live=work.num_live,
                num_verified=num_verified,
                num_accepted=num_accepted,
                is_sampled=is_sampled,
                num_allowed=num_allowed,
            )
            return partial(planner.observe, chains)
        tree = self._runner.sizes.tree
        assert tree is not None, "trees were verified"
        threshold = planner.threshold

        def observe_trees(has_time: bool) -> None:
            chains = _chains_in_trees(result, tree, threshold, num_allowed, is_sampled)
            verified, accepted = int(num_verified.sum()), int(num_accepted.sum())
            planner.observe_trees(chains, verified, accepted, has_time)

        return observe_trees


def num_drafted(request: Request, max_model_len: int) -> int:
    """Count this round's drafts: as many as fit into the context after the last token."""
    return min(request.num_speculative_tokens, max_model_len - request.num_tokens)


def _chains_in_trees(
    result: StepResult,
    tree: TreeShape,
    threshold: float,
    num_allowed: np.ndarray,
    is_sampled: np.ndarray,
) -> RoundOutcome:
    """Read from a round of trees what chains would have shown: each tree has one, its best tokens.

    If a tree left out the chain's next token, although it has deeper nodes, or is full while the
    trees had another level, that token ranked below every kept node; count it as IMPROBABLE.
    Without it, deep levels would be judged only by the chains that reached them. Other missing
    tokens were not drafted.

    threshold: of the mean path probability, below which trees stop
    num_allowed, is_sampled: [B] as in RoundOutcome; 0 allowed: the tree says nothing
    """
    B = len(num_allowed)
    shape = tree.of(B)
    confidences = np.zeros((B, tree.num_levels), np.float32)
    lengths, num_held = np.zeros((2, B), int)
    bounds = num_allowed.copy()
    node_depths = [depths(parents) for parents in result.draft_parents[:B]]
    last_level = _last_level(result, node_depths, threshold, num_allowed)
    for b in np.flatnonzero(num_allowed):
        parents = result.draft_parents[b]
        chain = first_children(parents)
        rows = chain[: shape.max_depth]  # drafted for fewer requests, it may be longer
        probs = np.array([1.0, *(result.draft_probs[b][row - 1] for row in rows)])
        confidences[b, : len(rows)] = probs[1:] / probs[:-1]
        lengths[b] = len(rows)
        if not rows:
            bounds[b] = 0
            continue
        is_full = len(parents) == shape.num_nodes and len(rows) < shape.num_levels
        if len(chain) < max(node_depths[b]) or (is_full and len(rows) < last_level):
            confidences[b, len(rows) :] = IMPROBABLE
        accepted = result.sampled_tokens[b][: result.num_accepted[b]]
        tokens = [result.draft_tokens[b][row - 1] for row in rows]
        equal = map(int.__eq__, tokens, accepted)
        num_held[b] = sum(1 for _ in itertools.takewhile(bool, equal))
    return RoundOutcome(
        confidences=confidences,
        num_live=tree.num_levels,
        num_verified=lengths,
        num_accepted=num_held,
        is_sampled=is_sampled,
        num_allowed=bounds,
    )


def _last_level(
    result: StepResult,
    node_depths: list[list[int]],
    threshold: float,
    num_allowed: np.ndarray,
) -> int:
    """Find the last level that a round's trees drafted together: the deepest node's, or one more.

    It is one more if the best paths to that depth were probable enough on average. A tree that kept
    no node of that depth counts with its least probable node: no path was more probable.
    """
    deepest = max(map(max, node_depths))
    best = []
    for b in np.flatnonzero(num_allowed > deepest):
        of_nodes, probs = node_depths[b][1:], result.draft_probs[b]
        if probs:
            best.append(probs[of_nodes.index(deepest) if deepest in of_nodes else -1])
    return deepest + bool(best and sum(best) >= threshold * len(best))
