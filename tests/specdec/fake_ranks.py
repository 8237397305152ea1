"""Ranks of one process: threads that take turns, as Triton's interpreter runs one at a time."""

from collections.abc import Callable
from threading import Condition, Thread
from typing import TypeVar

import torch
from torch import Tensor

from specdec.kernels.cut_ids import CutIds
from weights.shard import Shard

R = TypeVar("R")


class FakeRanks:
    """What `size` ranks exchange; a rank runs while it holds `turn`, and lets go to wait."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = Condition()
        self.given: list[Tensor | None] = [None] * size
        self.gathered = torch.empty(0)
        self.round = 0
        self.num_given = 0
        self.most_numbers = 0  # of one exchange, of one rank
        self.failures: list[BaseException] = []

    def run(self, of_rank: Callable[["FakeRank"], R]) -> list[R]:
        """Call a function on every rank; return what they return."""
        results: dict[int, R] = {}

        def body(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = of_rank(FakeRank(self, rank))
                except BaseException as failure:  # raised below
                    self.failures.append(failure)
                self.turn.notify_all()

        threads = [Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return [results[rank] for rank in range(self.size)]


class FakeRank:
    """One rank's end of the exchange."""

    def __init__(self, ranks: FakeRanks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank

    def gather(self, x: Tensor) -> Tensor:
        ranks = self.ranks
        ranks.given[self.rank] = x
        ranks.most_numbers = max(ranks.most_numbers, x.numel())
        ranks.num_given += 1
        mine = ranks.round
        if ranks.num_given == ranks.size:
            assert len({(each.shape, each.dtype) for each in ranks.given}) == 1, "not of one shape"
            ranks.gathered = torch.stack(ranks.given)
            ranks.round, ranks.num_given = mine + 1, 0
            ranks.turn.notify_all()
        ranks.turn.wait_for(lambda: ranks.round > mine or ranks.failures, timeout=60)
        assert ranks.round > mine, "a rank has failed, or exchanges less than the others"
        return ranks.gathered.clone()

    def cut(self, vocab_size: int) -> CutIds:
        return CutIds(Shard(self.rank, self.ranks.size), vocab_size, self)
