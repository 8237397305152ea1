"""Do the GPU tests of attention read and write only their own memory? Under compute-sanitizer.

    python -m scripts.memcheck [-j 10] [TESTS ...]

Several processes share the tests, since each test takes many times as long as by itself. Each
tensor has memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING): else what a kernel writes behind a
tensor might be memory of the next one, and nobody would notice. Exits with 1 if a test failed or
anything was found.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from weights.bars import bar

KERNELS = "tests/specdec/kernels"
ATTENTION = (  # the longest tests last
    *(f"{KERNELS}/test_{name}.py" for name in ("path_tails", "long_slots", "shared_splits")),
    *(f"{KERNELS}/test_{name}.py" for name in ("attention_parts", "beside", "needed")),
    "tests/specdec/bench/test_attention.py",
    *(f"{KERNELS}/test_{name}.py" for name in ("prompt_attention", "query_tiles")),
)
PYTEST = "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"
HAS_RUN = re.compile(r"^\S+::.* (PASSED|SKIPPED|FAILED|ERROR)", re.MULTILINE)


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


def main() -> None:
    args = parse_args()
    ids = collected(list(args.tests), args.marked)
    # one after another, since the tests of a file take about as long as each other
    parts = [part for i in range(args.processes) if (part := ids[i :: args.processes])]
    # --error-exitcode: else what the sanitizer finds would not change how pytest ends
    command = [*args.sanitizer.split(), "--error-exitcode", "86", sys.executable, *PYTEST]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        logs = [directory / f"{i}.log" for i in range(len(parts))]
        running = []
        for part, log in zip(parts, logs, strict=True):
            with log.open("w") as out:
                of_part = [*command, "-m", args.marked, "-v", "--tb=short", *part]
                running.append(subprocess.Popen(of_part, stdout=out, stderr=out, env=environment))
        try:
            _wait(running, logs, len(ids))
        finally:
            for process in running:
                process.kill()
        endings = [process.returncode for process in running]
        for ending, log in zip(endings, logs, strict=True):
            if ending != 0:
                print(f"ended with {ending}:\n{log.read_text()[-4000:]}")
    num_bad = sum(ending != 0 for ending in endings)
    print(f"{len(ids)} tests in {len(parts)} processes, {num_bad} not clean")
    sys.exit(1 if num_bad else 0)


def _wait(running: list[subprocess.Popen[bytes]], logs: list[Path], num_tests: int) -> None:
    with bar(total=num_tests, desc="checking", unit="test") as progress:
        while True:
            is_over = all(process.poll() is not None for process in running)
            num_done = sum(len(HAS_RUN.findall(log.read_text())) for log in logs)
            progress.update(num_done - progress.n)
            if is_over:
                return
            time.sleep(0.5)


if __name__ == "__main__":
    main()
