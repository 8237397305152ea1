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
import sys
import tempfile
from pathlib import Path

from tests.sanitized import Checks, collected
from weights.bars import bar

KERNELS = "tests/specdec/kernels"
ATTENTION = (  # the longest tests last
    *(f"{KERNELS}/test_{name}.py" for name in ("path_tails", "long_slots", "shared_splits")),
    *(f"{KERNELS}/test_{name}.py" for name in ("attention_parts", "beside", "needed", "wide_walk")),
    *(f"{KERNELS}/test_{name}.py" for name in ("prompt_attention", "query_tiles")),
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


def main() -> None:
    args = parse_args()
    ids = collected(list(args.tests), args.marked)
    # one after another, since the tests of a file take about as long as each other
    parts = [part for i in range(args.processes) if (part := ids[i :: args.processes])]
    with tempfile.TemporaryDirectory() as temporary, bar(total=len(ids), desc="checking") as shown:
        directory = args.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        checks = Checks(args.sanitizer, args.marked, args.processes, directory, shown)
        checks.run(parts)
        checks.run_again()
    print(f"{len(ids)} tests in {checks.num_processes} processes, {checks.num_bad} not clean")
    sys.exit(1 if checks.num_bad else 0)


if __name__ == "__main__":
    main()
