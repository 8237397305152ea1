"""How a batch runs: not captured, in captured pieces, or as one graph; and the key of its graph."""

import enum
from collections.abc import Hashable
from dataclasses import dataclass


class CUDAGraphMode(enum.Enum):
    """Runtime modes NONE, PIECEWISE, FULL, and pairs of them: (uniform decode batches, all others).

    As a configuration FULL means both, which CudaGraphManager refuses for ragged batches.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def decode_mode(self) -> "CUDAGraphMode":
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The runtime mode of every other batch."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def separate_routine(self) -> bool:
        """Whether uniform decode batches run differently from the others."""
        return isinstance(self.value, tuple)

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether any batch runs in captured pieces."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The key of a graph. None in num_reqs or query_len: the graph serves any."""

    num_tokens: int
    num_reqs: int | None = None
    query_len: int | None = None
    has_lora: bool = False  # some request of the batch has a LoRA adapter
    kind: Hashable = None  # of several forwards of a family over equally large batches
