"""What a start asks of the ranks of its engine, written once for all of them.

Every rank runs the same start. Where a decision depends on clocks or on what a device has left,
rank 0 makes it: the others run the steps that it measures, and take its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.arguments import is_integer
from specdec.parallel.followers import Followers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Says how many ranks an engine has; internal until weights are cut.

    compares: every rank digests each step's results, and one that differs ends the engine: for
        debugging, since all of them wait for their devices in each step
    """

    size: int = 1
    compares: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.size) or self.size < 1:
            raise ValueError(f"tensor_parallel_size={self.size!r}: give an integer of at least 1")


ONE_RANK = Parallel()


class Led(Protocol):
    """A runner knows those that follow it."""

    followers: Followers | None


class Ranks(Protocol):
    rank: int
    size: int

    def join(self, device: torch.device) -> None:
        """Connect with all ranks, once they have read their weights."""

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Have rank 0 decide by steps of its runner, which the others run as well."""

    def least(self, value: int) -> int:
        """Find the least of all ranks' values."""

    def after_first(self, work: Callable[[], object]) -> None:
        """Do something on rank 0 first, for what it leaves on the disk."""


class Alone:
    """Stands for the ranks of an engine that has only one."""

    rank = 0
    size = 1

    def join(self, device: torch.device) -> None:
        """Have nobody to connect with."""

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Decide."""
        return decide()

    def least(self, value: int) -> int:
        """Return the value."""
        return value

    def after_first(self, work: Callable[[], object]) -> None:
        """Do it."""
        work()


ALONE = Alone()
