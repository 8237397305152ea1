"""Rank 0's side: it tells the other ranks what it does, before it does it."""

import hashlib
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from specdec.parallel.group import Group, Joined
from specdec.parallel.messages import Kind, of_masks, of_round, of_rows, packed
from specdec.parallel.processes import Processes, RankError
from specdec.parallel.ranks import Led
from specdec.parallel.ring import Writer, nothing
from specdec.parallel.shared import NUM_DIGESTS, Place, Stage, wait_until
from specdec.rounds.results import PendingResult, StepResult
from specdec.rounds.step_sizes import RowMasks, Step
from specdec.rounds.upload import RowStart

T = TypeVar("T")


class Lead(Joined):
    """Leads the other ranks of an engine through its start and its steps.

    store: the descriptor of the group's store
    compares: every rank digests each step's results, and one that differs ends the engine: for
        debugging, since all of them wait for their devices in each step
    """

    def __init__(self, processes: Processes, store: int, compares: bool = False) -> None:
        super().__init__(0, processes.shared.num_ranks, compares)
        self.processes = processes
        self._shared = processes.shared
        self._store = store
        self._ring = Writer(self._shared, processes.check)
        self._num_built = -1  # runners, after the first one

    # the start

    def join(self, device: torch.device) -> None:
        """Connect with all ranks, once they have read the target's weights."""
        self._wait(Place.STAGE, Stage.JOINING)
        self._send(Kind.DECIDED, 0)
        connect = partial(Group, self._store, self.rank, self.size, device)
        self._group = _in_a_thread(connect, self.check)
        self.processes.told.append(self._group.abort)
        self.check()  # who failed before that was told to nobody

    def led(self, runner: Led, decide: Callable[[], int]) -> int:
        """Decide by steps of the runner, which the others run as well."""
        runner.followers = self
        value = decide()
        runner.followers = None
        self._send(Kind.DECIDED, value)
        return value

    def beside_first(self, work: Callable[[Callable[[], bool] | None], object]) -> None:
        """Do something; the others take what it leaves on the disk, and are told of its end."""
        work(None)
        self._send(Kind.DECIDED, 0)

    def build(self, plan: object) -> None:
        """Have the others build a runner, which is to run the next steps; see load_rank."""
        self._send(Kind.BUILD, pickle.dumps(plan))
        self._num_built += 1

    def serve(self) -> None:
        """End the start of a runner: wait until every other rank is ready for steps of requests."""
        self._send(Kind.SERVE)
        self._wait(Place.STAGE, Stage.SERVING + self._num_built)

    # steps

    def step(self, step: Step) -> Step:
        """Send a step; return it with masks that are sent once they are computed."""
        is_guided = step.masks is not None
        self._send(Kind.STEP, *of_round(step, step.max_seq_len, step.flags, is_guided))
        return step if step.masks is None else replace(step, masks=partial(self._masks, step.masks))

    def _masks(self, compute: Callable[[], RowMasks]) -> RowMasks:
        masks = compute()
        self._send(Kind.MASKS, *of_masks(masks))
        return masks

    def start_rows(
        self, starts: Sequence[tuple[int, RowStart]], grown: Sequence[tuple[int, int, int]]
    ) -> None:
        if starts or grown:
            self._send(Kind.ROWS, *of_rows(starts, grown))

    def place(self, rows: Mapping[str, np.ndarray]) -> None:
        self._send(Kind.PLACED, pickle.dumps(rows))

    def stop_below(self, threshold: float) -> None:
        self._send(Kind.THRESHOLD, float(threshold))

    def calibrate(self, values: np.ndarray) -> None:
        self._send(Kind.FACTORS, np.asarray(values, np.float32).tobytes())

    def compare(self, pending: PendingResult, result: StepResult) -> None:
        if not self._compares:
            return
        self._wait(Place.DIGESTS, pending.number)
        place = Place.FIRST_DIGEST + pending.number % NUM_DIGESTS
        own = digest(result)
        for rank in range(1, self.size):
            if self._shared.get(rank, place) != own:
                self.processes.fail(f"rank {rank} has other results of step {pending.number}")
        self.check()

    # the end

    def check(self) -> None:
        if self.waits_in_vain:
            self.processes.fail(self.waits_in_vain)
        self.processes.check()

    def tell(self, told: Callable[[], object]) -> None:
        self.processes.told.append(told)

    def end(self, reason: str, free: Callable[[], object] = nothing) -> None:
        if not self.processes.belong_here:
            return
        with suppress(RankError):  # it has ended
            self._send(Kind.END)
        group, self._group = self._group, None
        is_orderly = self.processes.close(reason)
        self.processes.told.clear()
        if group is not None and not is_orderly:
            group.abort()  # what waits for a rank that is gone
        try:
            free()
        finally:
            if group is not None:
                group.close()

    def fail_after(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # a rank's end may have caused it
            self.processes.settle()
        own = f"a step was interrupted: {type(error).__name__}: {error}"
        self.processes.fail(own)
        if self.processes.failure != own and not isinstance(error, RankError):
            raise RankError(self.processes.failure) from error

    def _send(self, kind: Kind, *values: Any) -> None:
        self.check()
        self._ring.send(packed(kind, *values))

    def _wait(self, place: Place, number: int) -> None:
        """Wait until all other ranks' numbers there are at least this."""
        ranks = range(1, self.size)
        wait_until(
            lambda: all(self._shared.get(rank, place) >= number for rank in ranks), self.check
        )


def _in_a_thread(work: Callable[[], T], check: Callable[[], object]) -> T:
    """Do what may wait for a rank that has ended, and what Ctrl-C cannot interrupt.

    check: called meanwhile; if it raises, the thread is left to itself
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="specdec-join", daemon=True).start()
    wait_until(done.done, check)
    return done.result()


def digest(result: StepResult) -> int:
    """Digest what a step decided and verified, in 64 bits; no padding, since it may be anything."""
    pairs = zip(result.sampled_tokens, result.num_accepted, strict=True)
    kept = [tokens[: count + 1] for tokens, count in pairs]
    parts = repr((kept, result.draft_tokens, result.draft_parents)), result.path_probs.tobytes()
    found = hashlib.blake2b(parts[0].encode() + parts[1], digest_size=8)
    return int.from_bytes(found.digest(), "little")
