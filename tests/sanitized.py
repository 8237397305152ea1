"""Tests in processes under compute-sanitizer; see scripts/memcheck.py."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PYTEST = "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"
HAS_RUN = re.compile(r"^(\S+::.*) (?:PASSED|SKIPPED|FAILED|ERROR)", re.MULTILINE)
# in what a process has printed before a signal ended it: a test that failed, or what was found
IS_BAD = re.compile(
    r"^\S+::.* (?:FAILED|ERROR)|^========= +(?:Invalid|Misaligned|Program hit)", re.MULTILINE
)


def collected(tests: list[str], marked: str) -> list[str]:
    """List the ids of all tests of these files."""
    command = [sys.executable, *PYTEST, "-m", marked, "--collect-only", "-q", *tests]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"pytest could not collect {tests}:\n{found.stdout}{found.stderr}")
    return [line for line in found.stdout.splitlines() if "::" in line]


class Checks:
    """Tests in processes under the sanitizer, whose logs go to a directory.

    num_bad: processes that did not end clean; a test that a signal ended counts once it ran again
    """

    def __init__(
        self, sanitizer: str, marked: str, at_a_time: int, directory: Path, progress: Any
    ) -> None:
        # --error-exitcode: else what the sanitizer finds would not change how pytest ends
        sanitized = *sanitizer.split(), "--error-exitcode", "86", sys.executable, *PYTEST
        self._command = [*sanitized, "-m", marked, "-v", "--tb=short"]
        self._plain = [sys.executable, *PYTEST, "-q", "-m", marked]
        self._at_a_time = at_a_time
        self._directory = directory
        self._progress = progress
        self._ended_by_signal: list[str] = []
        self.num_processes = self.num_bad = 0

    def run(self, parts: list[list[str]]) -> None:
        """Run each part in a process. What a signal has left of one goes on in another."""
        while parts:
            left = []
            for part, ending, text in self._check(parts):
                unfinished = part[len(HAS_RUN.findall(text)) :]
                if ending < 0 and unfinished:
                    self._ended_by_signal.append(unfinished[0])
                    left.append(unfinished[1:])
                    self.num_bad += IS_BAD.search(text) is not None
                else:
                    self.num_bad += ending != 0
            parts = [part for part in left if part]

    def run_again(self) -> None:
        """Run each test that a signal ended alone, once its kernels have been compiled."""
        tests = self._ended_by_signal
        if not tests:
            return
        plain = subprocess.run([*self._plain, *tests], check=False)
        print("without the sanitizer:", plain.returncode)
        bad = []
        for first in range(0, len(tests), self._at_a_time):
            alone = [[test] for test in tests[first : first + self._at_a_time]]
            bad += [part[0] for part, ending, _ in self._check(alone) if ending != 0]
        self.num_bad += len(bad)
        print(f"{len(tests)} tests were ended by a signal; checked again:")
        print(*(f"  {'bad' if test in bad else 'clean'}: {test}" for test in tests), sep="\n")

    def _check(self, parts: list[list[str]]) -> list[tuple[list[str], int, str]]:
        """Run parts; give each, how its process ended, and what it printed."""
        numbers = range(self.num_processes, self.num_processes + len(parts))
        logs = [self._directory / f"{number}.log" for number in numbers]
        self.num_processes += len(parts)
        endings = _run(self._command, parts, logs, self._progress)
        texts = [log.read_text() for log in logs]
        for ending, text in zip(endings, texts, strict=True):
            if ending != 0:
                print(f"ended with {ending}:\n{text[-4000:]}")
        return list(zip(parts, endings, texts, strict=True))


def _run(command: list[str], parts: list[list[str]], logs: list[Path], progress: Any) -> list[int]:
    """Run a part of the tests in each process, and say how the processes ended."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = []
    for part, log in zip(parts, logs, strict=True):
        with log.open("w") as out:
            process = subprocess.Popen([*command, *part], stdout=out, stderr=out, env=environment)
            running.append(process)
    num_before = progress.n
    try:
        while any(process.poll() is None for process in running):
            num_done = sum(len(HAS_RUN.findall(log.read_text())) for log in logs)
            progress.update(num_before + num_done - progress.n)
            time.sleep(0.5)
    finally:
        for process in running:
            process.kill()
    return [process.wait() for process in running]
