"""What a round launches: every kernel with its count and time, launches by kind, and the time when nothing runs.

The ranges are those of rounds.py, for torch.profiler and, on a GPU, for Nsight Systems too.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.bench.rounds import WARMUP, around_phases, steady, tokens_needed
from specdec.engine import Engine
from specdec.requests.params import SamplingParams

LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
LONGEST_NAME = 72
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProfile:
    """Per round. gap_share: of the time from the first to the last kernel, the part in which none runs.

    gaps_us: that time inside of phases and between them, "verify > accept"; the most that fewer graphs could save
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
    with steady(engine, prompts, 2 * num_rounds + WARMUP) as rounds:
        return _profile(engine, rounds.run, num_rounds)


def profile_serving(
    engine: Engine, prompts: Sequence[Sequence[int]], num_rounds: int
) -> RoundProfile:
    """The same with everything that the host does while it serves: results are read, requests brought up to date."""
    room = tokens_needed(num_rounds + 3 * WARMUP, engine.runner.sizes.num_speculative_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    engine.add_requests([(prompt, params) for prompt in prompts])
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    try:
        return _profile(engine, engine.step, num_rounds)
    finally:
        engine.abort_all()
        engine.drain()


def _profile(engine: Engine, run: Callable[[], object], num_rounds: int) -> RoundProfile:
    is_gpu = engine.runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    _run(run, WARMUP, is_gpu)
    with around_phases(engine.runner, named_range):
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
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    with record_function(f"round: {name}"):
        yield
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def read_profile(events: Sequence[FunctionEvent], num_rounds: int, is_gpu: bool) -> RoundProfile:
    """Kernels by phase and name, the longest first."""
    on_device = [
        event for event in events if event.device_type.name == ("CUDA" if is_gpu else "CPU")
    ]
    pieces = [
        Piece(str(event.name), event.time_range.start, event.time_range.end) for event in on_device
    ]
    ranges = [piece for piece in pieces if piece.name.startswith("round: ")]
    leaves = [not event.cpu_children for event in on_device]
    kernels = [
        piece
        for piece, is_leaf in zip(pieces, leaves, strict=True)
        if piece not in ranges and is_leaf
    ]
    kernels.sort(key=lambda piece: piece.start)
    launches = Counter(
        str(event.name) for event in events if str(event.name).endswith(_launch_endings())
    )
    busy, span = (
        _busy(kernels),
        max((k.end for k in kernels), default=0.0) - min((k.start for k in kernels), default=0.0),
    )
    return RoundProfile(
        kernels=_rows(kernels, ranges, num_rounds),
        launches={name: count / num_rounds for name, count in sorted(launches.items())},
        num_kernels=len(kernels) / num_rounds,
        busy_us=busy / num_rounds,
        span_us=span / num_rounds,
        gap_share=1 - busy / span if span else 0.0,
        gaps_us=_gaps(kernels, ranges, num_rounds),
    )


def _launch_endings() -> tuple[str, ...]:
    """cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch_v10000, ..."""
    return tuple(
        f"{name}{ending}"
        for name in LAUNCHES
        for ending in ("", "Ex", "ExC", "_v10000", "_v7000", "_ptsz")
    )


def _rows(kernels: Sequence[Piece], ranges: Sequence[Piece], num_rounds: int) -> list[Row]:
    counts: Counter[tuple[str, str]] = Counter()
    totals: dict[tuple[str, str], float] = {}
    for kernel in kernels:
        key = _phase(kernel, ranges), kernel.name[:LONGEST_NAME]
        counts[key] += 1
        totals[key] = totals.get(key, 0.0) + kernel.end - kernel.start
    everything = sum(totals.values()) or 1.0
    return [
        {
            "phase": phase,
            "count": counts[phase, name] / num_rounds,
            "us": total / num_rounds,
            "us_each": total / counts[phase, name],
            "share": total / everything,
            "kernel": name,
        }
        for (phase, name), total in sorted(totals.items(), key=lambda item: -item[1])
    ]


def _gaps(kernels: Sequence[Piece], ranges: Sequence[Piece], num_rounds: int) -> dict[str, float]:
    """Microseconds before kernels in which none runs, by the phases of the kernels around them; the largest first."""
    gaps: dict[str, float] = {}
    phases = [_phase(kernel, ranges) for kernel in kernels]
    ends = itertools.accumulate((kernel.end for kernel in kernels), max)
    for end, kernel, before, phase in zip(ends, kernels[1:], phases, phases[1:], strict=False):
        name = phase if phase == before else f"{before} > {phase}"
        gaps[name] = gaps.get(name, 0.0) + max(0.0, kernel.start - end)
    return {
        name: us / num_rounds for name, us in sorted(gaps.items(), key=lambda item: -item[1]) if us
    }


def _phase(kernel: Piece, ranges: Sequence[Piece]) -> str:
    """The innermost range in which a kernel begins; those on the device's own time line."""
    inside = [each for each in ranges if each.start <= kernel.start < each.end]
    return (
        min(inside, key=lambda each: each.end - each.start).name.removeprefix("round: ")
        if inside
        else "-"
    )


def _busy(kernels: Sequence[Piece]) -> float:
    """Microseconds in which at least one runs: neighbours may overlap."""
    total = 0.0
    ends = itertools.accumulate((kernel.end for kernel in kernels), max, initial=float("-inf"))
    for kernel, end_so_far in zip(kernels, ends, strict=False):
        total += max(0.0, kernel.end - max(kernel.start, end_so_far))
    return total
