"""What the results of steps tell the planner, and what it tells the device.

A round is described when its results are read, and told once the next step has been launched, so
that the planner learns beside it.
"""

import time

import numpy as np

from specdec.requests.request import Request
from specdec.rounds.results import PendingResult, StepResult
from specdec.runner import Runner
from specdec.scheduling.gains import Integers
from specdec.scheduling.outcomes import RoundOutcome
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
        return RoundOutcome(
            shape=shape,
            probs=result.path_probs[:B, :num_nodes],
            parents=result.draft_parents[:B] if shape.is_wide else (),
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


def _num_on_chains(result: StepResult, num_requests: int) -> Integers:
    """Count the drafts that held and that chains would have had too: first children all the way."""
    found = np.zeros(num_requests, np.intp)
    for b in range(num_requests):
        held = result.sampled_tokens[b][: result.num_accepted[b]]
        drafts, at = result.draft_tokens[b], 0
        for row, parent in enumerate(result.draft_parents[b], start=1):
            if parent == at:
                if found[b] == len(held) or drafts[row - 1] != held[found[b]]:
                    break
                found[b] += 1
                at = row
    return found


def _verified_shape(work: Work) -> DraftShape:
    return work.shape if work.shape.is_wide else chain(work.num_live)
