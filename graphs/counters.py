"""What a manager captured and what it ran: the proof that rounds were graphs, and what the graphs cost."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from graphs.modes import BatchDescriptor, CUDAGraphMode


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """One capture."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    num_graphs: int
    seconds: float
    num_bytes: int


class BatchKind(NamedTuple):
    """Batches that are counted together: how they ran, over how many rows, padding left out and included."""

    mode: CUDAGraphMode
    unpadded_tokens: int
    num_tokens: int


@dataclass(slots=True)
class GraphCounters:
    """Counts of one family."""

    batches: Counter[BatchKind] = field(default_factory=Counter)  # dispatched
    replays: Counter[CUDAGraphMode] = field(default_factory=Counter)
    captures: list[CaptureRecord] = field(default_factory=list)

    @property
    def dispatches(self) -> Counter[CUDAGraphMode]:
        """Batches by mode."""
        modes = Counter[CUDAGraphMode]()
        for kind, count in self.batches.copy().items():
            modes[kind.mode] += count
        return modes

    @property
    def padded_tokens(self) -> int:
        """Rows that dispatched batches computed for nothing."""
        return sum(
            (kind.num_tokens - kind.unpadded_tokens) * n for kind, n in self.batches.copy().items()
        )

    def rows(self) -> list[dict[str, object]]:
        """One row for each kind of batch, by mode and size."""
        kinds = sorted(
            self.batches.copy().items(), key=lambda item: (item[0].mode.name, *item[0][1:])
        )
        return [
            {
                "mode": kind.mode.name,
                "unpadded_tokens": kind.unpadded_tokens,
                "num_tokens": kind.num_tokens,
                "batches": count,
                "padded_tokens": (kind.num_tokens - kind.unpadded_tokens) * count,
            }
            for kind, count in kinds
        ]

    def as_dict(self) -> dict[str, object]:
        """What was captured and what ran, as JSON takes it."""
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
        """Seconds of all captures, warm-up included."""
        return sum(record.seconds for record in self.captures)

    @property
    def num_bytes(self) -> int:
        """Bytes of all captures."""
        return sum(record.num_bytes for record in self.captures)


def summary(families: Mapping[str, GraphCounters]) -> str:
    """One line: the batches of each family by mode, and the part of their rows that was padding."""
    parts = []
    for name, counters in families.items():
        counts = ", ".join(f"{mode.name} {count}" for mode, count in counters.dispatches.items())
        num_tokens = sum(kind.num_tokens * count for kind, count in counters.batches.copy().items())
        if num_tokens:
            parts.append(f"{name} {counts}, {counters.padded_tokens / num_tokens:.1%} padding")
    return "; ".join(parts)
