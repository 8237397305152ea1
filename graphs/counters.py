"""What a manager captured and at what cost, and what it ran: eagerly or as graphs, how padded."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from graphs.modes import BatchDescriptor, CUDAGraphMode

logger = logging.getLogger("graphs")  # an application sets its level


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    num_graphs: int
    seconds: float
    num_bytes: int


class BatchKind(NamedTuple):
    """Batches counted together: how they ran, and over how many rows without and with padding."""

    mode: CUDAGraphMode
    unpadded_tokens: int
    num_tokens: int

    @property
    def padded_tokens(self) -> int:
        return self.num_tokens - self.unpadded_tokens


@dataclass(slots=True)
class GraphCounters:
    batches: Counter[BatchKind] = field(default_factory=Counter)  # dispatched
    replays: Counter[CUDAGraphMode] = field(default_factory=Counter)
    captures: list[CaptureRecord] = field(default_factory=list)

    @property
    def dispatches(self) -> Counter[CUDAGraphMode]:
        modes = Counter[CUDAGraphMode]()
        for kind, count in self.batches.copy().items():
            modes[kind.mode] += count
        return modes

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return the number of batches and of their rows without padding, by mode."""
        found: dict[str, tuple[int, int]] = {}
        for kind, count in self.batches.copy().items():
            batches, rows = found.get(kind.mode.name, (0, 0))
            found[kind.mode.name] = batches + count, rows + count * kind.unpadded_tokens
        return found

    @property
    def padded_tokens(self) -> int:
        """Rows that dispatched batches computed for nothing."""
        return sum(kind.padded_tokens * count for kind, count in self.batches.copy().items())

    def forget_batches(self) -> None:
        """Count from here on: what ran so far was a rehearsal."""
        self.batches.clear()
        self.replays.clear()

    def rows(self) -> list[dict[str, object]]:
        """One row for each kind of batch, by mode and size."""
        batches = self.batches.copy()
        return [
            {
                "mode": kind.mode.name,
                "unpadded_tokens": kind.unpadded_tokens,
                "num_tokens": kind.num_tokens,
                "batches": batches[kind],
                "padded_tokens": kind.padded_tokens * batches[kind],
            }
            for kind in sorted(batches, key=lambda kind: (kind.mode.name, *kind[1:]))
        ]

    def as_dict(self) -> dict[str, object]:
        """What was captured and what ran, ready for JSON."""
        return {
            "num_graphs": self.num_graphs,
            "seconds": self.seconds,
            "num_bytes": self.num_bytes,
            "dispatches": {mode.name: count for mode, count in self.dispatches.items()},
            "replays": {mode.name: count for mode, count in self.replays.copy().items()},
            "padded_tokens": self.padded_tokens,
            "batches": self.rows(),
        }

    @property
    def num_graphs(self) -> int:
        """Graphs captured; a broken capture counts each segment."""
        return sum(record.num_graphs for record in self.captures)

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.captures)

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.captures)


def log_capture(
    what: str, mode: CUDAGraphMode, desc: BatchDescriptor, num_graphs: int, num_bytes: int
) -> None:
    line = "captured %s, %s, %s: %d segments, %d bytes"
    logger.debug(line, what, mode.name, desc, num_graphs, num_bytes)


def summary(families: Mapping[str, GraphCounters]) -> str:
    """One line: the batches of each family by mode, and the share of padding in their rows."""
    parts = []
    for name, counters in families.items():
        counts = ", ".join(f"{mode.name} {count}" for mode, count in counters.dispatches.items())
        num_tokens = sum(kind.num_tokens * count for kind, count in counters.batches.copy().items())
        if num_tokens:
            parts.append(f"{name} {counts}, {counters.padded_tokens / num_tokens:.1%} padding")
    return "; ".join(parts)
