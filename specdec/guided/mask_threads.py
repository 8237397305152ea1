"""Masks on threads of their own: one that takes too long ends its request and delays no other.

The limits of grammars.py count operations, but llguidance compares the items of a row pairwise, so
a hostile grammar of a few kB can make one mask take minutes within them, and nothing stops it. Then
its thread is left alone, at the lowest priority, and another one goes on with the next request;
while many such threads run, servers take no grammar that is new to them (guides.py). Only the
thread's own processor time counts, so that a busy machine ends no request.

A step has as many threads as the latest walks of its guides call for, mostly two where one would
do: on a busy machine a thread may wait milliseconds for a processor when it is woken, and then the
other one takes all walks. More threads would hold each other up, with the interpreter's lock or
with a walk that one has begun when it loses its processor. The longest walks begin first, and
further threads join if the step is not over in time. Guides that share a lock take turns on one
thread: a second one would wait for the lock, and its processor time would not say for how long.
"""

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from specdec.requests.guide import Walker
from specdec.requests.structured_outputs import GrammarsBusyError

LEAST_THREADS, MOST_THREADS = 2, 8
SHARE_SECONDS = 0.0005  # of a processor, for a thread of a step
PATIENCE_SECONDS = 0.0005  # until further threads join, as many as there are already
SECONDS = 0.05  # of a processor, for the masks of one request in one step
LOOK_SECONDS = 0.01  # between two looks at that time
MOST_LEFT = 16  # threads of the process that were left alone, from which on servers refuse grammars
TOO_LONG = f"a mask of its grammar takes more than {1000 * SECONDS:.0f} ms"

Walk = tuple[Walker, Sequence[int]]  # and the drafts that it follows


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


class Job:
    """Walks of a step that one thread takes one after another. places: of walks left to do."""

    def __init__(self, step: "Step", places: Iterable[int]) -> None:
        self.places = deque(places)
        self.is_abandoned = False
        self.thread: threading.Thread | None = None
        self.began = 0.0  # the thread's time when it took up the current walk
        self.expected_seconds = sum(step.walks[place][0].walk_seconds for place in self.places)
        self._step = step

    def run(self) -> None:
        """Run in the thread."""
        self.began = time.thread_time()
        self.thread = threading.current_thread()
        while self.places and not self.is_abandoned:
            guide, drafts = self._step.walks[self.places[0]]
            try:
                masks = guide.masks(drafts)
            except BaseException as error:
                self._step.fail(self, error)
                return
            self._step.take(self, masks)

    @property
    def seconds(self) -> float:
        """Return the processor time of the current walk so far."""
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
        places: dict[int, list[int]] = {}
        for place, (guide, _) in enumerate(walks):
            places.setdefault(id(guide.lock), []).append(place)
        jobs = (Job(self, taken) for taken in places.values())
        # jobs that have not ended
        self.jobs = sorted(jobs, key=lambda job: job.expected_seconds, reverse=True)
        self.waiting = deque(self.jobs)
        self._lock = threading.Lock()

    @property
    def num_threads_needed(self) -> int:
        """Count the threads that end it soon, or with the longest job; one of two may wake late."""
        seconds = [job.expected_seconds for job in self.jobs]
        return max(math.ceil(sum(seconds) / max(seconds[0], SHARE_SECONDS)), LEAST_THREADS)

    def run(self) -> bool:
        """Run waiting jobs in turn, in a thread; return whether the thread may go on."""
        while self.waiting:
            try:
                job = self.waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            job.run()
            if job.is_abandoned:
                return False
        return True

    def take(self, job: Job, masks: list[bytes]) -> None:
        """Take the masks of the job's current walk."""
        with self._lock:
            if not job.is_abandoned:
                self.found[job.places.popleft()] = masks
                job.began = time.thread_time()
                if not job.places:
                    self._remove(job)

    def fail(self, job: Job, error: BaseException) -> None:
        """Keep an error of a thread, for the caller to raise."""
        with self._lock:
            if not job.is_abandoned:
                self.error = error
                self._remove(job)

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
        guide, _ = self.walks[place]
        guide.give_up(TOO_LONG)
        self.found[place] = guide.masks(())
        with self._lock:
            if rest:
                self.jobs.append(Job(self, rest))
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
        self._steps = self._new_queue()

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

    def _new_queue(self) -> SimpleQueue[Step | None]:
        steps = SimpleQueue[Step | None]()
        weakref.finalize(self, steps.put, None)
        return steps

    def _add(self, step: Step, count: int) -> None:
        """Let further threads take part in a step, if it has jobs for them."""
        if not all(thread.is_alive() for thread in self._threads):  # a fork leaves the threads out
            self._threads = []
            self._steps = self._new_queue()
        step.num_threads += count
        while len(self._threads) < min(step.num_threads, len(step.jobs)):
            self._threads.append(_started(self._steps))
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


def _started(steps: SimpleQueue[Step | None]) -> threading.Thread:
    thread = threading.Thread(target=_run, args=(steps,), name="specdec-masks", daemon=True)
    thread.start()
    return thread


def _run(steps: SimpleQueue[Step | None]) -> None:
    while (step := steps.get()) is not None:
        if not step.run():
            return
        del step  # its guides may be large
    steps.put(None)  # for the next thread
