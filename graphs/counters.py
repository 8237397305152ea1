"""What a manager captured and what it ran: the proof that rounds were graphs, and what the graphs cost."""

from collections import Counter
from dataclasses import dataclass, field

from graphs.modes import BatchDescriptor, CUDAGraphMode


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """One capture."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    num_graphs: int
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class GraphCounters:
    """Counts of one family; keys are runtime modes."""

    dispatches: Counter[CUDAGraphMode] = field(default_factory=Counter)
    replays: Counter[CUDAGraphMode] = field(default_factory=Counter)
    padded_tokens: int = 0  # rows that dispatched batches computed for nothing
    captures: list[CaptureRecord] = field(default_factory=list)

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
