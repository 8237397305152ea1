"""Which graph serves a batch: a padding map by requests for uniform batches, one by tokens for all.

Ragged batches may have FULL graphs too: the one with the fewest tokens, then requests, that holds
the batch. What fits no FULL graph may fit a PIECEWISE one; what fits neither runs eagerly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sizes import padding_map


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a batch runs. For NONE the descriptor holds the true sizes, else the padded ones."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor


class Dispatcher:
    """Knows what was captured: for uniform batches of `query_len` rows per request, and for all."""

    def __init__(self, query_len: int) -> None:
        self.query_len = query_len
        # with and without LoRA: by request count, by token count
        self._full: dict[bool, list[Dispatch]] = {False: [], True: []}
        self._piecewise: dict[bool, list[Dispatch]] = {False: [], True: []}
        self._shapes: dict[bool, list[BatchDescriptor]] = {False: [], True: []}

    def set_captured(
        self,
        requests: Iterable[int],
        tokens: Iterable[int],
        has_lora: bool = False,
        shapes: Iterable[tuple[int, int]] = (),
    ) -> None:
        """What can be replayed from now on, for batches with or without LoRA."""
        full = [self.uniform(n, has_lora) for n in padding_map(sorted(requests))]
        pieces = [self.ragged(n, has_lora) for n in padding_map(sorted(tokens))]
        self._full[has_lora] = [Dispatch(CUDAGraphMode.FULL, desc) for desc in full]
        self._piecewise[has_lora] = [Dispatch(CUDAGraphMode.PIECEWISE, desc) for desc in pieces]
        by_tokens = sorted((tokens, reqs) for reqs, tokens in shapes)
        self._shapes[has_lora] = [self.shape(reqs, n, has_lora) for n, reqs in by_tokens]

    def uniform(self, num_reqs: int, has_lora: bool = False) -> BatchDescriptor:
        """The key of the FULL graph of `num_reqs` requests."""
        return BatchDescriptor(num_reqs * self.query_len, num_reqs, self.query_len, has_lora)

    def ragged(self, num_tokens: int, has_lora: bool = False) -> BatchDescriptor:
        """The key of the PIECEWISE graphs of `num_tokens` rows."""
        return BatchDescriptor(num_tokens, has_lora=has_lora)

    def shape(self, num_reqs: int, num_tokens: int, has_lora: bool = False) -> BatchDescriptor:
        """The key of the FULL graph of a ragged batch."""
        return BatchDescriptor(num_tokens, num_reqs, None, has_lora)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None,
        has_lora: bool = False,
        takes_shapes: bool = False,
    ) -> Dispatch:
        """The graph of a batch; query_len None if its requests have different numbers of rows.

        takes_shapes: such a batch is of the kind that FULL graphs by requests and tokens are for
        """
        if num_reqs < 1 or num_tokens < num_reqs:
            given = f"num_reqs={num_reqs}, num_tokens={num_tokens}"
            raise ValueError(f"{given}: a batch has a request, and a row for each")
        if query_len is not None and num_reqs * query_len != num_tokens:
            product = f"num_reqs={num_reqs} times query_len={query_len}"
            raise ValueError(f"num_tokens={num_tokens} is not {product}")
        full = self._full[has_lora]
        pieces = self._piecewise[has_lora]
        if query_len == self.query_len and num_reqs < len(full):
            return full[num_reqs]
        for desc in self._shapes[has_lora] if takes_shapes else ():
            if desc.num_tokens >= num_tokens and (desc.num_reqs or 0) >= num_reqs:
                return Dispatch(CUDAGraphMode.FULL, desc)
        if num_tokens < len(pieces):
            return pieces[num_tokens]
        batch = BatchDescriptor(num_tokens, num_reqs, query_len, has_lora)
        return Dispatch(CUDAGraphMode.NONE, batch)


def agreed_batch(batches: Sequence[BatchDescriptor]) -> BatchDescriptor:
    """The smallest batch that holds each rank's own, for ranks that must run equally many rows.

    It is uniform where all are and have the same query_len. The ranks first exchange their batches.
    """
    query_lens = {batch.query_len for batch in batches}
    query_len = query_lens.pop() if len(query_lens) == 1 else None
    num_reqs = max(batch.num_reqs or 1 for batch in batches)
    num_tokens = max(num_reqs, *(batch.num_tokens for batch in batches))
    return BatchDescriptor(num_tokens, num_reqs, query_len, any(b.has_lora for b in batches))
