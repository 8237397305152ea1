"""Compile for a Hopper GPU in processes, without one. Prints JSON: what happened, by name.

python -m tests.specdec.kernels.compile_in_processes      TRITON_CACHE_DIR: an empty directory
"""

import itertools
import json
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

from tests.specdec.kernels.compile_persistent import HOPPER, source_of, triton  # first: no GPU

# isort: split
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars

from specdec.kernels import before_compiling, norms
from specdec.kernels.compilations import CompilerProcesses, cached

GLUON = source_of(["128", "64", "1", "2", "split"])
OTHER = source_of(["128", "64", "1", "1", "split"])
OPTIONS = {
    "target": HOPPER,
    "options": {"num_warps": 4},
    "_env_vars": get_cache_invalidating_env_vars(),
}


def plain(columns: int = 128, **types: str) -> ASTSource:
    """A kernel in Triton; without types it does not compile."""
    constants = {
        "BLOCK_D": columns,
        "PDL": False,
        "SPLITS": 2,
        "HAS_BIAS": False,
        "places_ptr": None,
    }
    names = norms._add_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name) for name in names}
    signature = {name: kind or "i32" for name, kind in signature.items()}
    paths = {(names.index(name),): value for name, value in constants.items() if name in names}
    return ASTSource(norms._add_kernel, signature, paths, {})


def main() -> None:
    logging.basicConfig(level="INFO", format="%(message)s")
    types = {name: "*fp32" for name in norms._add_kernel.arg_names if name.endswith("_ptr")}
    found: dict[str, object] = {}
    with CompilerProcesses(2) as processes:
        good = [GLUON, plain(**types)]
        found["before"] = [cached(each, **OPTIONS)() for each in good]
        began = time.process_time()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: processes.prepare(each, **OPTIONS), good))
        found["seconds here"] = time.process_time() - began
        found["after"] = [cached(each, **OPTIONS)() for each in good]
        processes.prepare(plain(), **OPTIONS)  # its error is told
        first = processes._first
        assert first is not None
        os.killpg(first.pid, signal.SIGKILL)
        for _ in range(3):  # as is, once, that they have ended
            processes.prepare(OTHER, **OPTIONS)
        found["ended"] = cached(OTHER, **OPTIONS)()
    found["status"] = first.returncode
    processes = CompilerProcesses(1)
    processes.prepare(GLUON, **OPTIONS)
    found["started for nothing"] = processes._first is not None
    with patch.object(sys, "executable", "/nowhere"), CompilerProcesses(2) as processes:
        for _ in range(3):
            processes.prepare(OTHER, **OPTIONS)
    others = [plain(columns, **types) for columns in (64, 32)]
    found["elsewhere"] = [
        wait_for_another(*each) for each in zip(others, (True, False), strict=True)
    ]
    found["in this thread"] = before_compiling.get() is not None
    found["version"] = triton.__version__
    print(json.dumps(found))


def wait_for_another(wanted: ASTSource, is_compiled: bool) -> bool:
    """Wait for a kernel that another process compiles, or not; whether this one had to."""
    looks = itertools.count()
    with CompilerProcesses(1) as others, CompilerProcesses(1, lambda: goes_on()) as processes:

        def goes_on() -> bool:
            if next(looks) < 2:
                return True
            if is_compiled:
                others.prepare(wanted, **OPTIONS)
            return is_compiled

        processes.prepare(wanted, **OPTIONS)
        assert cached(wanted, **OPTIONS)()
        return processes._first is not None


if __name__ == "__main__":
    main()
