"""Processes that are ranks of one gloo group and run functions together, for tests.

They are started once and serve many tests: a start takes as long as importing torch.
"""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
from torch import distributed

from weights.shard import Shard

R = TypeVar("R")
PATIENCE_S = 60


class RankProcesses:
    """Ranks that wait for a function; they are started again after one that fails."""

    def __init__(self, size: int, directory: str) -> None:
        self.size = size
        self._directory = directory
        self._starts = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., R], *args: object) -> list[R]:
        """Call function(shard, group, *args) on every rank; return what each returned."""
        if not self._ranks:
            self._start()
        ends = [end for _, end in self._ranks]
        for end in ends:
            end.send_bytes(pickle.dumps((function, args)))
        answers: dict[Connection, R] = {}
        problem = None
        while len(answers) < self.size and problem is None:
            ready = wait([end for end in ends if end not in answers], PATIENCE_S)
            problem = None if ready else f"{len(answers)} of {self.size} ranks have answered"
            for end in ready:
                answers[end], error = pickle.loads(end.recv_bytes())
                problem = problem or error
        if problem:  # others may wait for this rank
            self.close()
        assert problem is None, problem
        return [answers[end] for end in ends]

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks.clear()

    def _start(self) -> None:
        self._starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = Shard(rank, self.size), f"{self._directory}/{self._starts}", theirs
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self._ranks.append((process, ours))


@contextmanager
def rank_processes(size: int) -> Iterator[RankProcesses]:
    with tempfile.TemporaryDirectory() as directory:
        ranks = RankProcesses(size, directory)
        try:
            yield ranks
        finally:
            ranks.close()


def _serve(shard: Shard, store: str, end: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, shard.size),
        rank=shard.rank,
        world_size=shard.size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    group = distributed.group.WORLD.group_name
    while True:
        function, args = pickle.loads(end.recv_bytes())
        try:
            with torch.inference_mode():
                answer = function(shard, group, *args), None
        except BaseException:
            answer = None, f"rank {shard.rank}: {traceback.format_exc()}"
        end.send_bytes(pickle.dumps(answer))
