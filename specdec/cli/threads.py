"""How many torch threads are fastest for this model on this machine, now: measured, then set.

A round of a small model is hundreds of short operations, and threads that wait for each other cost
more than they gain; on a busy machine even more so. OMP_NUM_THREADS is obeyed instead, if it is
set. The number of threads changes no token.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from specdec.kernels.linear import linear
from specdec.runner import Runner

SECONDS = 0.3  # for all measurements
GAIN = 0.9  # more threads must take less than this share of the time
SLICE_BYTES = 1 << 26  # of the largest product
MOST_BYTES = 1 << 28  # of a model whose whole round is timed too

Step = Callable[[], object]


def choose_threads(runner: Runner) -> None:
    """On a CPU, set the number of threads and say so."""
    cores = len(os.sched_getaffinity(0))
    if runner.device.type != "cpu" or os.environ.get("OMP_NUM_THREADS") or cores == 1:
        return
    counts = [1 << i for i in range(cores.bit_length()) if 1 << i < cores]
    found = fastest(steps_of(runner), [*counts, cores])
    torch.set_num_threads(found)
    print(f"threads: {found} of {cores} cores (OMP_NUM_THREADS sets them)", file=sys.stderr)


def steps_of(runner: Runner) -> list[Step]:
    """Make what is timed: a part of the largest product, and of a small model a round of padding.

    The product goes first: on a busy machine a round of several threads may take seconds.
    """
    weights = list(runner.target.model.parameters())
    largest = max((weight for weight in weights if weight.ndim == 2), key=lambda each: each.nbytes)
    num_rows = max(SLICE_BYTES // (largest.shape[1] * largest.itemsize), 1)
    part = largest.detach()[:num_rows]
    x = torch.ones(runner.sizes.query_len, part.shape[1], dtype=part.dtype)
    steps: list[Step] = [lambda: linear(x, part)]
    if sum(weight.nbytes for weight in weights) <= MOST_BYTES:
        steps.append(lambda: runner.run_step([-1], max_num_computed=1))
    return steps


def fastest(steps: Sequence[Step], counts: Sequence[int]) -> int:
    """Choose the first of the counts, unless a later one is clearly faster in every step."""
    share = SECONDS / len(counts) / len(steps)
    best, least = counts[0], [math.inf] * len(steps)
    for count in counts:
        times: list[float] = []
        for step, limit in zip(steps, least, strict=True):
            times.append(median_seconds(step, count, share))
            if times[-1] >= GAIN * limit:
                break
        else:
            best, least = count, times
    return best


def median_seconds(step: Step, count: int, seconds: float) -> float:
    """Time a step with this many threads, for about as long as `seconds`."""
    torch.set_num_threads(count)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)  # the first one warms up
