"""Do the GPU tests of attention read and write only their own memory? Under compute-sanitizer.

    python -m scripts.memcheck [-j 10] [TESTS ...]

Several processes share the tests, since each test takes many times as long as by itself; some take
more than 9 GB. Each tensor has memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING): else what a
kernel writes behind a tensor might be memory of the next one, and nobody would notice.

Where a signal ends a process, another one runs the tests that were left. The sanitizer has faults
of its own while kernels are compiled: so the test in which that happened runs once without it,
which leaves the compiled kernels in Triton's cache, and once more under it.
Exits with 1 if a test failed, did not end, or anything was found.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weights.bars import bar

KERNELS = "tests/specdec/kernels"
ATTENTION = (  # the longest tests last
    *(f"{KERNELS}/test_{name}.py" for name in ("path_tails", "long_slots", "shared_splits")),
    *(f"{KERNELS}/test_{name}.py" for name in ("attention_parts", "beside", "needed", "wide_walk")),
    "tests/specdec/bench/test_attention.py",
    *(f"{KERNELS}/test_{name}.py" for name in ("prompt_attention", "query_tiles")),
)
PYTEST = "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"
HAS_RUN = re.compile(r"^(\S+::.*) (?:PASSED|SKIPPED|FAILED|ERROR)", re.MULTILINE)
# in what a process has printed before a signal ended it: a test that failed, or what was found
IS_BAD = re.compile(
    r"^\S+::.* (?:FAILED|ERROR)|^========= +(?:Invalid|Misaligned|Program hit)", re.MULTILINE
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=ATTENTION)
    parser.add_argument("-j", "--processes", type=int, default=10)
    parser.add_argument("-m", "--marked", default="gpu", help="as of pytest")
    parser.add_argument("--sanitizer", default="compute-sanitizer --tool memcheck")
    parser.add_argument(
        "--logs", type=Path, help="keep what each process prints, in this directory"
    )
    return parser.parse_args()


def collected(tests: list[str], marked: str) -> list[str]:
    """The ids of all tests of these files."""
    command = [sys.executable, *PYTEST, "-m", marked, "--collect-only", "-q", *tests]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"pytest could not collect {tests}:\n{found.stdout}{found.stderr}")
    return [line for line in found.stdout.splitlines() if "::" in line]


class Checks:
    """Tests in processes under the sanitizer, whose logs go to a directory.

    num_bad: processes that did not end clean; a test that a signal ended counts once it ran again
    """

    def __init__(self, args: argparse.Namespace, directory: Path, progress: Any) -> None:
        # --error-exitcode: else what the sanitizer finds would not change how pytest ends
        sanitized = *args.sanitizer.split(), "--error-exitcode", "86", sys.executable, *PYTEST
        self._command = [*sanitized, "-m", args.marked, "-v", "--tb=short"]
        self._plain = [sys.executable, *PYTEST, "-q", "-m", args.marked]
        self._at_a_time = args.processes
        self._directory = directory
        self._progress = progress
        self._ended_by_signal: list[str] = []
        self.num_processes = self.num_bad = 0

    def run(self, parts: list[list[str]]) -> None:
        """Each part in a process. What is left of one that a signal ended goes on in another."""
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
        """What a signal ended, each test alone, once its kernels have been compiled."""
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
        """Each part, how its process ended, and what it printed."""
        numbers = range(self.num_processes, self.num_processes + len(parts))
        logs = [self._directory / f"{number}.log" for number in numbers]
        self.num_processes += len(parts)
        endings = _run(self._command, parts, logs, self._progress)
        texts = [log.read_text() for log in logs]
        for ending, text in zip(endings, texts, strict=True):
            if ending != 0:
                print(f"ended with {ending}:\n{text[-4000:]}")
        return list(zip(parts, endings, texts, strict=True))


def main() -> None:
    args = parse_args()
    ids = collected(list(args.tests), args.marked)
    # one after another, since the tests of a file take about as long as each other
    parts = [part for i in range(args.processes) if (part := ids[i :: args.processes])]
    with tempfile.TemporaryDirectory() as temporary, bar(total=len(ids), desc="checking") as shown:
        directory = args.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        checks = Checks(args, directory, shown)
        checks.run(parts)
        checks.run_again()
    print(f"{len(ids)} tests in {checks.num_processes} processes, {checks.num_bad} not clean")
    sys.exit(1 if checks.num_bad else 0)


def _run(command: list[str], parts: list[list[str]], logs: list[Path], progress: Any) -> list[int]:
    """How the processes end, each of which runs a part of the tests."""
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


if __name__ == "__main__":
    main()
