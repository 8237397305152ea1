"""Which graph serves a batch: the smallest FULL one of its kind, or a PIECEWISE one of any.

A FULL graph serves batches with as many rows for each request, or ragged ones, that it holds: the
one with the fewest tokens, then requests, is chosen. What fits none may fit a PIECEWISE one, by
tokens; what fits neither runs eagerly.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sizes import padding_map

Group = tuple[int | None, bool, Hashable]  # of batches that one FULL graph may serve


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a batch runs. For NONE the descriptor holds the true sizes, else the padded ones."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor


class Dispatcher:
    """Knows what was captured."""

    def __init__(self) -> None:
        self._full: dict[Group, list[Dispatch]] = {}
        self._piecewise: dict[bool, list[Dispatch]] = {}  # by tokens, with and without LoRA

    def set_captured(self, captured: Iterable[BatchDescriptor]) -> None:
        """Replace what can be replayed from now on; without num_reqs a batch runs in pieces."""
        self._full, self._piecewise = {}, {}
        pieces: dict[bool, list[int]] = {}
        for desc in sorted(captured, key=lambda each: (each.num_tokens, each.num_reqs or 0)):
            if desc.num_reqs is None:
                pieces.setdefault(desc.has_lora, []).append(desc.num_tokens)
            else:
                found = Dispatch(CUDAGraphMode.FULL, desc)
                self._full.setdefault(group_of(desc), []).append(found)
        for has_lora, sizes in pieces.items():
            padded = (BatchDescriptor(n, has_lora=has_lora) for n in padding_map(sizes))
            found_pieces = [Dispatch(CUDAGraphMode.PIECEWISE, desc) for desc in padded]
            self._piecewise[has_lora] = found_pieces

    def dispatch(self, batch: BatchDescriptor, most_reqs: int | None = None) -> Dispatch:
        """Choose the graph of a batch; query_len None if its requests have different rows.

        most_reqs: of a FULL graph; None: any number
        """
        num_reqs, num_tokens, query_len = batch.num_reqs or 0, batch.num_tokens, batch.query_len
        if num_reqs < 1 or num_tokens < num_reqs:
            given = f"num_reqs={num_reqs}, num_tokens={num_tokens}"
            raise ValueError(f"{given}: a batch has a request, and a row for each")
        if query_len is not None and num_reqs * query_len != num_tokens:
            product = f"num_reqs={num_reqs} times query_len={query_len}"
            raise ValueError(f"num_tokens={num_tokens} is not {product}")
        for each in self._full.get(group_of(batch), ()):
            desc = each.descriptor
            found_reqs = desc.num_reqs or 0
            fits = most_reqs is None or found_reqs <= most_reqs
            if fits and desc.num_tokens >= num_tokens and found_reqs >= num_reqs:
                return each
        pieces = self._piecewise.get(batch.has_lora, [])
        if num_tokens < len(pieces):
            return pieces[num_tokens]
        return Dispatch(CUDAGraphMode.NONE, batch)


def group_of(desc: BatchDescriptor) -> Group:
    """Name what a batch and a FULL graph that serves it have in common."""
    return desc.query_len, desc.has_lora, desc.kind


def agreed_batch(batches: Sequence[BatchDescriptor]) -> BatchDescriptor:
    """The smallest batch that holds each rank's own, for ranks that must run equally many rows.

    It is uniform where all are and have the same query_len. The ranks first exchange their batches.
    """
    query_lens = {batch.query_len for batch in batches}
    query_len = query_lens.pop() if len(query_lens) == 1 else None
    num_reqs = max(batch.num_reqs or 1 for batch in batches)
    num_tokens = max(num_reqs, *(batch.num_tokens for batch in batches))
    return BatchDescriptor(num_tokens, num_reqs, query_len, any(b.has_lora for b in batches))
