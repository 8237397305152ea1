"""How profile_round.py reads a profile: each kernel of a round, launches by kind, and idle time."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.autograd.profiler_util import FunctionEvent

LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
LAUNCH_ENDINGS = tuple(  # cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch_v10000, ...
    name + end for name in LAUNCHES for end in ("", "Ex", "ExC", "_v10000", "_v7000", "_ptsz")
)
RANGE, LONGEST_NAME = "round: ", 72


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProfile:
    """Per round. gap_share: the idle part of the time from the first kernel to the last.

    kernels: us: from the start to the end of each, of which kernels that start early wait for a
    part. added_us: from the end of all before it to its own, idle time before it too; together
    these are span_us, so of two rounds they say which kernels make one longer.
    gaps_us: idle time inside of phases and between them, "choose > commit".
    """

    kernels: list[dict[str, object]]
    launches: dict[str, float]
    num_kernels: float
    busy_us: float
    span_us: float
    gap_share: float
    gaps_us: dict[str, float]


class Piece(NamedTuple):
    """A kernel's run, or a range: microseconds."""

    name: str
    start: float
    end: float


def read_profile(events: Sequence[FunctionEvent], num_rounds: int, is_gpu: bool) -> RoundProfile:
    """Kernels by phase and name, the longest first; idle times, the largest first."""
    on_device = [e for e in events if e.device_type.name == ("CUDA" if is_gpu else "CPU")]
    pieces = [(Piece(e.name, e.time_range.start, e.time_range.end), e) for e in on_device]
    ranges = [piece for piece, _ in pieces if piece.name.startswith(RANGE)]
    kernels = [p for p, e in pieces if not p.name.startswith(RANGE) and not e.cpu_children]
    kernels.sort(key=lambda piece: piece.start)
    times, added, gaps = defaultdict(list), Counter(), Counter()
    first = end = min((kernel.start for kernel in kernels), default=0.0)
    before, busy = "", 0.0
    for kernel in kernels:  # end: of all before
        phase = _phase(kernel, ranges)
        key = phase, kernel.name[:LONGEST_NAME]
        times[key].append(kernel.end - kernel.start)
        added[key] += max(kernel.end - end, 0.0)
        busy += max(kernel.end - max(kernel.start, end), 0.0)  # neighbours may overlap
        gaps[phase if phase == before else f"{before} > {phase}"] += max(kernel.start - end, 0.0)
        end, before = max(end, kernel.end), phase
    everything = sum(map(sum, times.values())) or 1.0
    rows = [
        {"phase": phase, "count": len(each) / num_rounds, "us": sum(each) / num_rounds}
        | {"us_each": sum(each) / len(each), "added_us": added[phase, name] / num_rounds}
        | {"share": sum(each) / everything, "kernel": name}
        for (phase, name), each in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
    launches = Counter(str(event.name) for event in events if event.name.endswith(LAUNCH_ENDINGS))
    return RoundProfile(
        kernels=rows,
        launches={name: count / num_rounds for name, count in sorted(launches.items())},
        num_kernels=len(kernels) / num_rounds,
        busy_us=busy / num_rounds,
        span_us=(end - first) / num_rounds,
        gap_share=1 - busy / (end - first) if end > first else 0.0,
        gaps_us={name: us / num_rounds for name, us in gaps.most_common() if us},
    )


def _phase(kernel: Piece, ranges: Sequence[Piece]) -> str:
    """The innermost range in which a kernel begins, on the device's own time line."""
    inside = [each for each in ranges if each.start <= kernel.start < each.end]
    innermost = min(inside, key=lambda each: each.end - each.start, default=None)
    return "-" if innermost is None else innermost.name.removeprefix(RANGE)
