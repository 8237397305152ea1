"""Masks on a thread of their own: one that takes too long ends its request and delays no other.

The limits of grammars.py count operations, but llguidance compares the items of a row pairwise, so
a hostile grammar of a few kB can make one mask take minutes within them, and nothing stops it. Then
its thread is left alone, at the lowest priority, and another one goes on with the next request.
What counts is the thread's own processor time, so that a busy machine ends no request.
"""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from specdec.requests.guide import Guide

SECONDS = 0.05  # of a processor, for the masks of one request in one step
LOOK_SECONDS = 0.01  # between two looks at that time
TOO_LONG = f"a mask of its grammar takes more than {1000 * SECONDS:.0f} ms"

Walk = tuple[Guide, Sequence[int]]  # and the drafts that it follows


class Job:
    """The walks of a step, one after another; `found` has the masks of those that are done."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self.found: list[list[bytes]] = []
        self.error: BaseException | None = None
        self.is_over = threading.Event()
        self.is_abandoned = False
        self.began: float | None = None  # the thread's time when it took up the current walk
        self._walks = walks
        self._lock = threading.Lock()

    def run(self) -> None:
        """In the thread."""
        try:
            for guide, drafts in self._walks:
                self.began = time.thread_time()
                masks = guide.masks(drafts)
                with self._lock:
                    if self.is_abandoned:
                        return
                    self.found.append(masks)
        except BaseException as error:
            self.error = error
        self.is_over.set()

    def abandon(self) -> None:
        """Nothing is added to `found` from here on."""
        with self._lock:
            self.is_abandoned = True


class MaskThread:
    """Starts with the first job."""

    def __init__(self) -> None:
        self._jobs = SimpleQueue[Job | None]()
        self._thread: threading.Thread | None = None

    def masks(self, walks: Sequence[Walk]) -> list[list[bytes]]:
        """What each guide allows. One that takes too long is given up, and allows nothing."""
        found: list[list[bytes]] = []
        while len(found) < len(walks):
            job = Job(walks[len(found) :])
            thread = self._started()
            self._jobs.put(job)
            while not job.is_over.wait(LOOK_SECONDS):
                if _seconds(thread, job) > SECONDS:
                    job.abandon()
                    break
            found += job.found
            if job.is_abandoned:
                self._leave(thread)
            if job.error is not None:
                raise job.error
            if job.is_abandoned and len(found) < len(walks):
                guide, _ = walks[len(found)]
                guide.give_up(TOO_LONG)
                found.append(guide.masks(()))
        return found

    def _started(self) -> threading.Thread:
        """A fork leaves the thread behind."""
        if self._thread is None or not self._thread.is_alive():
            self._jobs = jobs = SimpleQueue[Job | None]()
            self._thread = threading.Thread(
                target=_run, args=(jobs,), name="specdec-masks", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, jobs.put, None)
        return self._thread

    def _leave(self, thread: threading.Thread) -> None:
        self._thread = None
        assert thread.native_id is not None, thread
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread.native_id, 19)


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        if job.is_abandoned:
            return


def _seconds(thread: threading.Thread, job: Job) -> float:
    """Of the current walk."""
    if job.began is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) - job.began
