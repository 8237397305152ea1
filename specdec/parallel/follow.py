"""The side of the other ranks: they run on their own runner what rank 0 does on its own.

They read no results and send nothing back but numbers in shared memory.
"""

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specdec.parallel.group import Group, Joined
from specdec.parallel.lead import digest
from specdec.parallel.messages import Kind, Plain, to_masks, to_round, to_rows, unpacked
from specdec.parallel.ranks import Led
from specdec.parallel.ring import Reader
from specdec.parallel.shared import NUM_DIGESTS, Place, Shared, Stage, fence
from specdec.rounds.step_sizes import RowMasks
from specdec.runner import Runner


class Follow(Joined):
    """Follows rank 0, as each of the others does. store, compares: see Lead"""

    def __init__(self, shared: Shared, rank: int, store: int, compares: bool = False) -> None:
        super().__init__(rank, shared.num_ranks, compares)
        self._shared = shared
        self._store = store
        self._ring = Reader(shared, rank)

    # the start

    def join(self, device: torch.device) -> None:
        """Connect with all ranks, once they have read the target's weights."""
        self._shared.set(self.rank, Place.STAGE, Stage.JOINING)
        self._decided(*self._receive())
        self._group = Group(self._store, self.rank, self.size, device)

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Run rank 0's steps until it has decided."""
        assert isinstance(runner, Runner), runner
        return self._decided(*self._run(runner))

    def beside_first(self, work: Callable[[Callable[[], bool] | None], object]) -> None:
        """Do something beside rank 0, whose next message says that it has done it."""
        self._ring.note_done()  # however long rank 0 takes, this rank is not stuck
        work(lambda: not self._ring.has_message)
        self._decided(*self._receive())

    def _decided(self, kind: Kind, values: Plain) -> int:
        assert kind is Kind.DECIDED, kind
        value: int = values[0]
        return value

    # steps

    def serve(self, build: Callable[[Any], Runner]) -> None:
        """Build runners by rank 0's plans, and run its steps on the latest; SystemExit at the end.

        build: what load_rank has returned
        """
        runner: Runner | None = None
        while True:
            kind, values = self._receive() if runner is None else self._run(runner)
            if kind is Kind.BUILD:
                if runner is not None:
                    runner.graphs.clear_all_graphs()
                runner = None
                gc.unfreeze()
                self._shared.set(self.rank, Place.DIGESTS, 0)
                runner = build(pickle.loads(values[0]))
                continue
            assert kind is Kind.SERVE, kind
            gc.collect()  # a collection that walks over modules would hold up all ranks
            gc.freeze()
            stage = self._shared.get(self.rank, Place.STAGE)
            self._shared.set(self.rank, Place.STAGE, max(stage + 1, Stage.SERVING))

    def _run(self, runner: Runner) -> tuple[Kind, Plain]:
        """Do what messages say, up to the first that says nothing about a step."""
        while True:
            kind, values = self._receive()
            if self.waits_in_vain:
                raise RuntimeError(self.waits_in_vain)
            if kind is Kind.STEP:
                self._step(runner, values)
            elif kind is Kind.ROWS:
                runner.start_rows(*to_rows(values))
            elif kind is Kind.PLACED:
                runner.place(pickle.loads(values[0]))
            elif kind is Kind.THRESHOLD:
                runner.stop_below(*values)
            elif kind is Kind.FACTORS:
                runner.calibrate(np.frombuffer(bytearray(values[0]), np.float32).reshape(2, -1))
            else:
                return kind, values

    def _step(self, runner: Runner, values: Plain) -> None:
        round, max_seq_len, flags, is_guided = to_round(values)
        step = runner.bounded_step(round, max_seq_len, flags, self._masks if is_guided else None)
        with torch.inference_mode():
            runner.acts.run(step)
        if self._compares:
            latest = runner.results.latest
            place = Place.FIRST_DIGEST + latest.number % NUM_DIGESTS
            self._shared.set(self.rank, place, digest(latest.read()))
            fence()
            self._shared.set(self.rank, Place.DIGESTS, latest.number)

    def _masks(self) -> RowMasks:
        kind, values = self._receive()
        assert kind is Kind.MASKS, kind
        return to_masks(values)

    def _receive(self) -> tuple[Kind, Plain]:
        kind, values = unpacked(self._ring.receive())
        if kind is Kind.END:
            raise SystemExit(0)
        return kind, values
