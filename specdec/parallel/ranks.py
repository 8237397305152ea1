"""What a start asks of the ranks of its engine, written once for all of them.

Every rank runs the same start. Where a decision depends on clocks or on what a device has left,
rank 0 makes it: the others run the steps that it measures, and take its answer.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from specdec.parallel.exchange import Exchange
from specdec.parallel.followers import Followers
from weights.shard import WHOLE, Shard


class Led(Protocol):
    """A runner knows those that follow it."""

    followers: Followers | None


class Ranks(Protocol):
    rank: int
    size: int

    @property
    def shard(self) -> Shard:
        """Say which part of the models this rank reads."""

    @property
    def exchange(self) -> Exchange | None:
        """Give what the models of joined ranks exchange parts by. None: they are whole"""

    def join(self, device: torch.device) -> None:
        """Connect with all ranks, once they have read the target's weights."""

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Have rank 0 decide by steps of its runner, which the others run as well."""

    def least(self, value: int) -> int:
        """Find the least of all ranks' values."""

    def beside_first(self, work: Callable[[Callable[[], bool] | None], object]) -> None:
        """Do something that rank 0 leaves on the disk, bit by bit, for the others.

        work: takes whether rank 0 is still at it; None: on rank 0 itself
        """


class Alone:
    """Stands for the ranks of an engine that has only one."""

    rank = 0
    size = 1
    shard = WHOLE
    exchange = None

    def join(self, device: torch.device) -> None:
        """Have nobody to connect with."""

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Decide."""
        return decide()

    def least(self, value: int) -> int:
        """Return the value."""
        return value

    def beside_first(self, work: Callable[[Callable[[], bool] | None], object]) -> None:
        """Do it."""
        work(None)


ALONE = Alone()
