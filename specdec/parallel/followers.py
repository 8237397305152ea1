"""What rank 0's steps tell the other ranks: whatever its host writes to the device.

A runner without other ranks has no followers. What each method sends is run by follow.py on the
runner of another rank, in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from specdec.rounds.results import PendingResult, StepResult
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import RowStart


class Followers(Protocol):
    def step(self, step: Step) -> Step:
        """Send a step that is run next; return what to run, which sends its masks later.

        RankError if a rank has failed.
        """

    def start_rows(
        self, starts: Sequence[tuple[int, RowStart]], grown: Sequence[tuple[int, int, int]]
    ) -> None:
        """Send state rows that are written next; see Runner.start_rows."""

    def place(self, rows: Mapping[str, np.ndarray]) -> None:
        """Send numbers of state rows that are measured next; see Runner.place."""

    def stop_below(self, threshold: float) -> None:
        """Send the threshold of drafts; see Runner.stop_below."""

    def calibrate(self, values: np.ndarray) -> None:
        """Send factors of drafts, float32 [2, K]; see Runner.calibrate."""

    def compare(self, pending: PendingResult, result: StepResult) -> None:
        """Compare a step's result with those of the other ranks, in a debugging run.

        RankError names the rank and the step that differ.
        """

    def check(self) -> None:
        """RankError if a rank has failed, or the engine has been ended."""

    def tell(self, told: Callable[[], object]) -> None:
        """Have this called, by another thread, if a rank fails while nothing is sent to it."""

    def end(self, reason: str, free: Callable[[], object]) -> None:
        """Let the other ranks end after their steps; later calls raise RankError with this.

        free: frees graphs, before what they transfer by
        """

    def fail_after(self, error: BaseException) -> None:
        """End the other ranks at once. RankError if one of them had failed before this error."""
