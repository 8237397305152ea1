"""Which graph serves a batch: two padding maps, one by requests for uniform batches, one by tokens for the others.

A uniform batch that is too large for a FULL graph may still fit a PIECEWISE one; what fits neither runs eagerly.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sizes import padding_map


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a batch runs. For NONE the descriptor holds the true sizes, else the padded ones."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor


class Dispatcher:
    """Knows what has been captured for uniform batches of `query_len` rows per request, and for others."""

    def __init__(self, query_len: int) -> None:
        self.query_len = query_len
        self._full: list[Dispatch] = []  # by request count
        self._piecewise: list[Dispatch] = []  # by token count

    def set_captured(self, requests: Iterable[int], tokens: Iterable[int]) -> None:
        """What can be replayed from now on."""
        full = {n: Dispatch(CUDAGraphMode.FULL, self.uniform(n)) for n in sorted(requests)}
        pieces = {n: Dispatch(CUDAGraphMode.PIECEWISE, BatchDescriptor(n)) for n in sorted(tokens)}
        self._full = [full[n] for n in padding_map(list(full))]
        self._piecewise = [pieces[n] for n in padding_map(list(pieces))]

    def uniform(self, num_reqs: int) -> BatchDescriptor:
        """The key of the FULL graph of that many requests."""
        return BatchDescriptor(num_reqs * self.query_len, num_reqs, self.query_len)

    def dispatch(self, num_reqs: int, num_tokens: int, query_len: int | None) -> Dispatch:
        """The graph for a batch; query_len None means that its requests have different numbers of rows."""
        if num_reqs < 1 or num_tokens < num_reqs:
            raise ValueError(f"num_reqs={num_reqs}, num_tokens={num_tokens}: a batch has a request, and a row for each")
        if query_len is not None and num_reqs * query_len != num_tokens:
            raise ValueError(f"num_tokens={num_tokens} is not num_reqs={num_reqs} times query_len={query_len}")
        if query_len == self.query_len and num_reqs < len(self._full):
            return self._full[num_reqs]
        if num_tokens < len(self._piecewise):
            return self._piecewise[num_tokens]
        return Dispatch(CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs, query_len))
