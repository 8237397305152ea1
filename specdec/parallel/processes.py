"""The processes of the other ranks: rank 0 starts them, watches them and ends them.

Each is a fresh interpreter, in a process group that Ctrl-C does not reach. A thread looks at them:
if one has ended, or has given no sign of life for too long, all are ended, and the failure says
which rank it was and what it wrote last. A process ends by itself once rank 0's has (worker.py).
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from specdec.parallel.shared import Place, Shared, Stage

PROGRAM = "from specdec.parallel.worker import main; main()"
# NVLink multicast can take a host down: nothing may use it
NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
NUM_LINES = 20  # of a rank's last words
LOOK_SECONDS = 0.1
LONGEST_LOOK_SECONDS = 1.0  # more between two looks is a pause, which ranks may have had too
LOADING_SECONDS = 120.0  # without a sign of life, while a rank imports and loads
SILENT_SECONDS = 10.0  # the same, once it serves
STUCK_SECONDS = 300.0  # that a rank may take for a step, which may build a runner
CLOSING_SECONDS = 10.0  # for steps that were launched, and to free what a rank has
READING_SECONDS = 1.0  # for the last words of a rank that has ended
SETTLING_SECONDS = 1.5  # after an error, for the watch to see whether a rank has ended, and read


class RankError(RuntimeError):
    """A rank of the engine has failed, or the engine was ended after an error."""


class Process:
    """Runs one rank. files: that it inherits. start: what it reads first, pickled."""

    def __init__(self, rank: int, files: Sequence[int], start: object) -> None:
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=NUM_LINES)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=files,
            env=os.environ | NO_MULTICAST | {"PYTHONPATH": _path()},
            process_group=0,
        )
        output, given = self.popen.stdout, self.popen.stdin
        assert output is not None, rank
        assert given is not None, rank
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError), given:  # it has ended, which the watch finds
            pickle.dump(start, given)

    def _read(self, output: IO[bytes]) -> None:
        """Show what the rank writes, and keep the last of it."""
        with output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self.lines.append(text)
                with suppress(OSError, ValueError):  # stderr may be closed
                    print(f"rank {self.rank}: {text}", file=sys.stderr)

    def words_of(self, status: int) -> str:
        """Say how it ended."""
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by {signal.Signals(-status).name}"

    def last_lines(self) -> str:
        self._reader.join(READING_SECONDS)
        return "".join(f"\n    {line}" for line in self.lines)


def _path() -> str:
    """List where modules are found; "" stands for the directory of an interactive session."""
    return os.pathsep.join(map(os.path.abspath, sys.path))


class Processes:
    """Has all other ranks of an engine in processes that have begun.

    They end with this object at the latest, or with the interpreter.
    starts: by rank, from 1 on
    files: that they inherit, beside that of the memory
    """

    def __init__(self, shared: Shared, starts: Sequence[object], files: Sequence[int] = ()) -> None:
        self.shared = shared
        self.failure: str | None = None  # why the engine has ended
        # called after a failure, maybe by another thread
        self.told: list[Callable[[], object]] = []
        self._owner = os.getpid()
        self._all: list[Process] = []
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._all, self._is_over, self._owner)
        try:
            for rank, start in enumerate(starts, 1):
                self._all.append(Process(rank, [shared.file, *files], start))
        except BaseException:
            self._end()
            raise
        finally:
            os.close(shared.file)  # the memory stays mapped
        watch = _Watch(self._all, shared, weakref.ref(self))
        threading.Thread(
            target=watch.run, args=(self._is_over,), name="specdec-ranks", daemon=True
        ).start()

    @property
    def belong_here(self) -> bool:
        """Whether this process started them; a forked child has copies of all this."""
        return self._owner == os.getpid()

    def check(self) -> None:
        """RankError if the engine has ended, or belongs to the process that forked this one."""
        if self.failure is not None:
            raise RankError(self.failure)
        if not self.belong_here:
            raise RankError(f"the engine belongs to process {self._owner}: build one here")

    def settle(self) -> None:
        """Give the watch time to find a rank that has failed."""
        self._is_over.wait(SETTLING_SECONDS)

    def fail(self, failure: str) -> None:
        """End all ranks for this reason, if they have not ended."""
        with self._lock:
            if self.failure is not None:
                return
            _kill(self._all, self._is_over)
            self.failure = failure
        for told in self.told:
            told()
        self._end()

    def close(self, reason: str) -> bool:
        """Wait for ranks that were asked to end, and end those that do not. True: all did."""
        with self._lock:
            if self.failure is None:
                self._is_over.set()
                _wait(self._all)
                self._end()
                self.failure = reason
        _wait(self._all)
        return all(each.popen.returncode == 0 for each in self._all)


class _Watch:
    def __init__(
        self, processes: list[Process], shared: Shared, owner: "weakref.ref[Processes]"
    ) -> None:
        self._processes = processes
        self._shared = shared
        self._owner = owner
        self._seen: dict[tuple[int, Place], tuple[int, float]] = {}  # number, and seconds since

    def run(self, is_over: threading.Event) -> None:
        looked_at = time.monotonic()
        while not is_over.wait(LOOK_SECONDS):
            now = time.monotonic()
            passed, looked_at = min(now - looked_at, LONGEST_LOOK_SECONDS), now
            found = (self._failure_of(each, passed) for each in self._processes)
            failed = [each for each in found if each]
            owner = self._owner() if failed and not is_over.is_set() else None
            if owner is not None:
                owner.fail(failed[0])

    def _failure_of(self, process: Process, passed: float) -> str | None:
        rank = process.rank
        status = process.popen.poll()
        if status is not None:
            return f"rank {rank} {process.words_of(status)}{process.last_lines()}"
        is_serving = self._shared.get(rank, Place.STAGE) >= Stage.SERVING
        limit = SILENT_SECONDS if is_serving else LOADING_SECONDS
        done = self._shared.get(rank, Place.MESSAGES)
        is_at_work = is_serving and done < self._shared.get(0, Place.MESSAGES)
        beats = self._shared.get(rank, Place.BEATS)
        problem = ""
        if self._seconds_of(rank, Place.BEATS, beats, passed) > limit:
            problem = f"has given no sign of life for {limit:g} s"
        stuck = self._seconds_of(rank, Place.MESSAGES, done if is_at_work else -1, passed)
        if is_at_work and stuck > STUCK_SECONDS:
            problem = f"has been at one step for {STUCK_SECONDS:g} s"
        if not problem:
            return None
        process.popen.kill()  # its output ends
        return f"rank {rank} {problem}{process.last_lines()}"

    def _seconds_of(self, rank: int, place: Place, number: int, passed: float) -> float:
        """Count the seconds for which a number has been the same. passed: since the last look"""
        before, seconds = self._seen.get((rank, place), (number, 0.0))
        self._seen[rank, place] = number, seconds + passed if number == before else 0.0
        return self._seen[rank, place][1]


def _end(processes: list[Process], is_over: threading.Event, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has copies of all this
        _kill(processes, is_over)
        _wait(processes)


def _kill(processes: list[Process], is_over: threading.Event) -> None:
    is_over.set()
    for each in processes:
        each.popen.kill()


def _wait(processes: list[Process]) -> None:
    """Wait for their ends, but not longer than they may take."""
    ends_at = time.monotonic() + CLOSING_SECONDS
    for each in processes:
        with suppress(subprocess.TimeoutExpired):
            each.popen.wait(max(ends_at - time.monotonic(), 0.0))
