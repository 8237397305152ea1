"""What a step asks of whatever proposes its drafts.

A drafter writes nodes to the state rows (tokens, parents, probabilities, and how many are live) and
nothing else that outlives the step but its own KV.
"""

from typing import Protocol

from specdec.passes.families import Captures
from specdec.rounds.step_sizes import Step


class Drafter(Protocol):
    def extend(self, step: Step) -> None:
        """Take in the step's rows; where it proposes, the first level may be written here."""

    def propose(self, step: Step) -> None:
        """Write the nodes of the levels that are left."""

    def captures(self) -> Captures:
        """List what is captured, in order."""
