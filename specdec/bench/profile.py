"""What a round launches: each kernel with its count and time, launches by kind, and idle time.

The ranges are the acts of step.PHASES, for torch.profiler and, on a GPU, for Nsight Systems too.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.bench.report import Row
from specdec.bench.rounds import WARMUP, steady
from specdec.bench.timing import wrapped
from specdec.engine import Engine
from specdec.step import PHASES

# cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch_v10000, ...
LAUNCH_ENDINGS = tuple(
    f"{name}{ending}"
    for name in ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
    for ending in ("", "Ex", "ExC", "_v10000", "_v7000", "_ptsz")
)
LONGEST_NAME = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProfile:
    """Per round. gap_share: the idle part of the time from the first kernel to the last.

    kernels: us: from the start to the end of each, of which kernels that start early wait for a
    part. added_us: from the end of all before it to its own, idle time before it too; together
    these are span_us, so of two rounds they say which kernels make one longer.
    gaps_us: idle time inside of phases and between them, "choose > commit"; fewer graphs could save
    no more than that.
    """

    kernels: list[Row]
    launches: dict[str, float]
    num_kernels: float
    busy_us: float
    span_us: float
    gap_share: float
    gaps_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel's run, or a range: microseconds."""

    name: str
    start: float
    end: float


def profile_rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], num_rounds: int
) -> RoundProfile:
    """Rounds in steady state under torch.profiler; on a CPU its operators stand for kernels."""
    with steady(engine, prompts, num_rounds + WARMUP) as rounds:
        return _profile(engine, rounds.run, num_rounds)


def _profile(engine: Engine, run: Callable[[], object], num_rounds: int) -> RoundProfile:
    is_gpu = engine.runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    _run(run, WARMUP, is_gpu)
    with wrapped(engine.runner.acts, PHASES, named_range):
        with profile(activities=activities):
            _run(run, WARMUP, is_gpu)  # the profiler's own first steps are slow
        with profile(activities=activities) as recorded:
            _run(run, num_rounds, is_gpu)
    return read_profile(list(recorded.events()), num_rounds, is_gpu)


def _run(run: Callable[[], object], count: int, is_gpu: bool) -> None:
    for _ in range(count):
        run()
    if is_gpu:
        torch.cuda.synchronize()


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range for torch.profiler and for NVTX."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with nvtx, record_function(f"round: {name}"):
        yield


def read_profile(events: Sequence[FunctionEvent], num_rounds: int, is_gpu: bool) -> RoundProfile:
    """Kernels by phase and name, the longest first."""
    kind = "CUDA" if is_gpu else "CPU"
    on_device = [event for event in events if event.device_type.name == kind]
    ranges = [_piece(event) for event in on_device if _is_range(event)]
    kernels = [_piece(e) for e in on_device if not _is_range(e) and not e.cpu_children]
    kernels.sort(key=lambda piece: piece.start)
    launches = Counter(str(event.name) for event in events if event.name.endswith(LAUNCH_ENDINGS))
    first = min((kernel.start for kernel in kernels), default=0.0)
    last = max((kernel.end for kernel in kernels), default=0.0)
    busy = _busy(kernels)
    span = last - first
    return RoundProfile(
        kernels=_rows(kernels, ranges, num_rounds),
        launches={name: count / num_rounds for name, count in sorted(launches.items())},
        num_kernels=len(kernels) / num_rounds,
        busy_us=busy / num_rounds,
        span_us=span / num_rounds,
        gap_share=1 - busy / span if span else 0.0,
        gaps_us=_gaps(kernels, ranges, num_rounds),
    )


def _is_range(event: FunctionEvent) -> bool:
    return str(event.name).startswith("round: ")


def _piece(event: FunctionEvent) -> Piece:
    return Piece(str(event.name), event.time_range.start, event.time_range.end)


def _rows(kernels: Sequence[Piece], ranges: Sequence[Piece], num_rounds: int) -> list[Row]:
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    added: defaultdict[tuple[str, str], float] = defaultdict(float)
    end = min((kernel.start for kernel in kernels), default=0.0)  # of all before
    for kernel in kernels:
        key = _phase(kernel, ranges), kernel.name[:LONGEST_NAME]
        times[key].append(kernel.end - kernel.start)
        added[key] += max(kernel.end - end, 0.0)
        end = max(end, kernel.end)
    everything = sum(map(sum, times.values())) or 1.0
    return [
        {
            "phase": phase,
            "count": len(each) / num_rounds,
            "us": sum(each) / num_rounds,
            "us_each": sum(each) / len(each),
            "added_us": added[phase, name] / num_rounds,
            "share": sum(each) / everything,
            "kernel": name,
        }
        for (phase, name), each in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]


def _gaps(kernels: Sequence[Piece], ranges: Sequence[Piece], num_rounds: int) -> dict[str, float]:
    """Idle microseconds before each kernel, by the phases around them; the largest first."""
    gaps: defaultdict[str, float] = defaultdict(float)
    phases = [_phase(kernel, ranges) for kernel in kernels]
    ends = itertools.accumulate((kernel.end for kernel in kernels), max)
    for end, kernel, before, phase in zip(ends, kernels[1:], phases, phases[1:], strict=False):
        name = phase if phase == before else f"{before} > {phase}"
        gaps[name] += max(0.0, kernel.start - end)
    largest_first = sorted(gaps.items(), key=lambda item: -item[1])
    return {name: us / num_rounds for name, us in largest_first if us}


def _phase(kernel: Piece, ranges: Sequence[Piece]) -> str:
    """The innermost range in which a kernel begins, on the device's own time line."""
    inside = [each for each in ranges if each.start <= kernel.start < each.end]
    innermost = min(inside, key=lambda each: each.end - each.start, default=None)
    return "-" if innermost is None else innermost.name.removeprefix("round: ")


def _busy(kernels: Sequence[Piece]) -> float:
    """Microseconds in which at least one runs: neighbours may overlap."""
    total = 0.0
    ends = itertools.accumulate((kernel.end for kernel in kernels), max, initial=float("-inf"))
    for kernel, end_so_far in zip(kernels, ends, strict=False):
        total += max(0.0, kernel.end - max(kernel.start, end_so_far))
    return total
