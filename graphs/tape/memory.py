"""The memory of captures on the tape: what a replay may read, and what it finds when it should not have.

An owner is one forward, captured as one or several graphs. Its results live as long as its graphs. They are NaN (-1 for
integers) until its first replay, and again once another owner of the same pool has replayed, as memory of a CUDA pool
would hold someone else's numbers. What a capture wrote in place is put back at its end, since a capture does nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from graphs.weak import weak_view

Region: TypeAlias = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(slots=True)
class Result:
    """Memory that was made in a capture; the only strong reference to it is `storage`."""

    storage: torch.UntypedStorage
    flat: Tensor

    def is_pinned(self) -> bool:
        """Whether a tensor beside ours keeps the memory."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) > 1


@dataclass(slots=True)
class OwnerMemory:
    """Everything that the captures of one owner made or wrote."""

    results: dict[int, Result] = field(default_factory=dict)
    constants: list[torch.UntypedStorage] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    saved: set[Region] = field(default_factory=set)
    num_graphs: int = 0

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in a result."""
        return tensor.untyped_storage().data_ptr() in self.results

    def add_result(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that an op of the capture made."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.results:
            self.results[storage.data_ptr()] = Result(storage, _flat(tensor))

    def add_constant(self, tensor: Tensor) -> None:
        """Keep a number that became a tensor on the way: it is part of the kernel's arguments on CUDA."""
        self.constants.append(tensor.untyped_storage())

    def save(self, tensor: Tensor) -> None:
        """Remember what is in `tensor` before its first in-place write."""
        region = tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
        if not self.owns(tensor) and region not in self.saved:
            self.saved.add(region)
            self.undo.append(partial(weak_view(tensor).copy_, tensor.clone()))

    def save_rows(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
        """Remember tensor[indices]: the write of a few rows should not cost a copy of a whole cache."""
        if not self.owns(tensor):
            kept = [None if index is None else index.clone() for index in indices]
            rows = torch.ops.aten.index.Tensor(tensor, kept)
            self.undo.append(
                partial(torch.ops.aten.index_put_.default, weak_view(tensor), kept, rows)
            )

    def settle(self) -> None:
        """The capture is over: as if nothing had run."""
        with torch.inference_mode():
            for undo in reversed(self.undo):
                undo()
        self.undo.clear()
        self.saved.clear()
        self.spoil()

    def spoil(self) -> None:
        """Fill the results with what no reader takes for a number."""
        with torch.inference_mode():
            for result in self.results.values():
                result.flat.fill_(float("nan") if result.flat.is_floating_point() else -1)

    def num_bytes(self) -> int:
        """Bytes of all results."""
        return sum(result.storage.nbytes() for result in self.results.values())

    def pinned_bytes(self) -> int:
        """Bytes that somebody outside still refers to strongly."""
        return sum(
            result.storage.nbytes() for result in self.results.values() if result.is_pinned()
        )


def _flat(tensor: Tensor) -> Tensor:
    alias = weak_view(tensor).untyped_storage()
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(alias, 0, (alias.nbytes() // tensor.dtype.itemsize,), (1,))
