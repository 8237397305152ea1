"""Masks on threads of their own: one that takes too long ends its request and delays no other.

The limits of grammars.py count operations, but llguidance compares the items of a row pairwise, so
a hostile grammar of a few kB can make one mask take minutes within them, and nothing stops it. Then
its thread is left alone, at the lowest priority, and another one goes on with the next request;
while many such threads run, servers take no grammar that is new to them (guides.py). Only the
thread's own processor time counts, so that a busy machine ends no request.

A step has as many threads as the latest walks of its guides call for, at least two, since one may
wait milliseconds for a processor when it is woken; more would hold each other up. The longest walks
begin first, and further threads join if the step is not over in time. Guides that share a lock take
turns on one thread: a second one would wait for the lock, and its processor time would not say for
how long.
"""

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from specdec.requests.structured_outputs import GrammarsBusyError, Guide

LEAST_THREADS, MOST_THREADS = 2, 8
SHARE_SECONDS = 0.0005  # of a processor, for a thread of a step
PATIENCE_SECONDS = 0.0005  # until further threads join, as many as there are already
SECONDS = 0.05  # of a processor, for the masks of one request in one step
LOOK_SECONDS = 0.01  # between two looks at that time
MOST_LEFT = 16  # threads of the process that were left alone, from which on servers refuse grammars
TOO_LONG = f"a mask of its grammar takes more than {1000 * SECONDS:.0f} ms"


class Walk(NamedTuple):
    """The masks of a guide that a step needs: after the first drafts and each one further."""

    guide: Guide
    drafts: Sequence[int]
    first: int = 0


_left_alone: list[threading.Thread] = []
_left_lock = threading.Lock()


def check_few_left() -> None:
    """Raise GrammarsBusyError while many threads that were left alone still run."""
    with _left_lock:
        _left_alone[:] = [thread for thread in _left_alone if thread.is_alive()]
        count = len(_left_alone)
    if count >= MOST_LEFT:
        raise GrammarsBusyError(
            f"{count} masks that take too long are still computed: no new grammar is taken until "
            f"fewer than {MOST_LEFT} are; try again later"
        )


def most_threads() -> int:
    """Count the processors that this process may use, up to MOST_THREADS."""
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


@dataclass(slots=True, eq=False)
class Job:
    """Walks of a step that one thread takes one after another."""

    places: deque[int]  # of walks left to do
    expected_seconds: float = 0.0
    is_abandoned: bool = False
    thread: threading.Thread | None = None
    began: float = 0.0  # the thread's time when it took up the current walk

    @property
    def seconds(self) -> float:
        if self.thread is None or self.thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident)) - self.began


class Step:
    """The walks of a step and, once it is over, their masks."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self.walks = walks
        self.found: list[list[bytes]] = [[] for _ in walks]
        self.error: BaseException | None = None
        self.num_threads = 0  # that were asked to take part
        self.is_over = threading.Event()
        jobs: dict[int, Job] = {}
        for place, walk in enumerate(walks):
            job = jobs.setdefault(id(walk.guide.lock), Job(deque()))
            job.places.append(place)
            job.expected_seconds += walk.guide.walk_seconds
        # jobs that have not ended
        self.jobs = sorted(jobs.values(), key=lambda job: job.expected_seconds, reverse=True)
        self.waiting = deque(self.jobs)
        self._lock = threading.Lock()

    @property
    def num_threads_needed(self) -> int:
        """Count the threads that end it soon, or with the longest job; one of two may wake late."""
        seconds = [job.expected_seconds for job in self.jobs]
        return max(math.ceil(sum(seconds) / max(seconds[0], SHARE_SECONDS)), LEAST_THREADS)

    def run(self) -> bool:
        """Run waiting jobs in turn, in a thread; return whether the thread may go on."""
        while True:
            try:
                job = self.waiting.popleft()
            except IndexError:
                return True
            self._run_job(job)
            if job.is_abandoned:
                return False

    def _run_job(self, job: Job) -> None:
        job.began = time.thread_time()
        job.thread = threading.current_thread()
        while job.places and not job.is_abandoned:
            guide, drafts, first = self.walks[job.places[0]]
            masks: list[bytes] = []
            error = None
            try:
                masks = guide.masks(drafts, first)
            except BaseException as found:  # for the caller to raise
                error = found
            with self._lock:
                if job.is_abandoned:  # what comes later does not count
                    return
                self.error = self.error or error
                self.found[job.places.popleft()] = masks
                job.began = time.thread_time()
                if error is not None or not job.places:
                    self._remove(job)
                    return

    def abandon_slow(self) -> list[Job]:
        """Leave alone jobs whose current walk takes too long; their later results do not count."""
        with self._lock:
            slow = [job for job in self.jobs if job.seconds > SECONDS]
            for job in slow:
                job.is_abandoned = True
        return slow

    def give_up(self, job: Job) -> None:
        """Give up the guide of an abandoned job's walk; the rest of the job waits for a thread."""
        place, *rest = job.places
        guide = self.walks[place].guide
        guide.give_up(TOO_LONG)
        self.found[place] = guide.masks(())
        with self._lock:
            if rest:
                self.jobs.append(Job(deque(rest)))
                self.waiting.append(self.jobs[-1])
            self._remove(job)

    def _remove(self, job: Job) -> None:
        self.jobs.remove(job)
        if not self.jobs:
            self.is_over.set()


class MaskThreads:
    def __init__(self) -> None:
        self._most = most_threads()
        self._threads: list[threading.Thread] = []
        self._steps = SimpleQueue[Step | None]()

    def masks(self, walks: Sequence[Walk]) -> list[list[bytes]]:
        """Return what each guide allows; one that takes too long is given up and allows nothing."""
        step = Step(walks)
        self._add(step, min(step.num_threads_needed, self._most))
        while step.num_threads < self._most and not step.is_over.wait(PATIENCE_SECONDS):
            self._add(step, min(step.num_threads, self._most - step.num_threads))
        while not step.is_over.wait(LOOK_SECONDS):
            for job in step.abandon_slow():
                self._leave(job)
                step.num_threads -= 1
                step.give_up(job)
                self._add(step, 1)
        if step.error is not None:
            raise step.error
        return step.found

    def _add(self, step: Step, count: int) -> None:
        """Let further threads take part in a step, if it has jobs for them."""
        # a fork leaves the threads out
        if not self._threads or not all(thread.is_alive() for thread in self._threads):
            self._threads = []
            self._steps = SimpleQueue()
            weakref.finalize(self, self._steps.put, None)
        step.num_threads += count
        while len(self._threads) < min(step.num_threads, len(step.jobs)):
            queue = (self._steps,)
            thread = threading.Thread(target=_run, args=queue, name="specdec-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in range(min(count, len(step.waiting))):
            self._steps.put(step)

    def _leave(self, job: Job) -> None:
        assert job.thread is not None, job.places
        self._threads.remove(job.thread)
        with _left_lock:
            _left_alone.append(job.thread)
        native_id = job.thread.native_id
        assert native_id is not None, job.thread
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, native_id, 19)


def _run(steps: SimpleQueue[Step | None]) -> None:
    while (step := steps.get()) is not None:
        if not step.run():
            return
        del step  # its guides may be large
    steps.put(None)  # for the next thread
