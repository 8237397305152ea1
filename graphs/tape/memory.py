"""The memory of captures on the tape: results, which are poisoned when CUDA would not keep them.

An owner is one forward, captured as one or several graphs. Its results live as long as its graphs.
They are NaN (-1 for integers) until its first replay, and again after another owner of the same
pool has replayed: in a CUDA pool the memory would then hold other numbers. What a capture wrote in
place is put back at its end, since a capture computes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphs.weak import weak_view

Region: TypeAlias = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class Result(NamedTuple):
    """Memory that was made in a capture, owned by `storage`; `flat` is a weak view of it all."""

    storage: torch.UntypedStorage
    flat: Tensor


@dataclass(slots=True)
class OwnerMemory:
    """Everything that the captures of one owner made or wrote."""

    results: dict[int, Result] = field(default_factory=dict)
    # numbers that became tensors; on CUDA they are arguments of kernels
    constants: list[torch.UntypedStorage] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    saved: set[Region] = field(default_factory=set)
    num_graphs: int = 0
    num_bytes: int = 0  # of the results

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.results

    def add_result(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that an op of the capture made."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.results:
            flat = weak_view(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
            self.results[storage.data_ptr()] = Result(storage, flat)
            self.num_bytes += storage.nbytes()

    def save(self, tensor: Tensor) -> None:
        """Remember what is in `tensor` before its first in-place write."""
        region = tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
        if not self.owns(tensor) and region not in self.saved:
            self.saved.add(region)
            self.undo.append(partial(weak_view(tensor).copy_, tensor.clone()))

    def save_rows(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
        """Remember tensor[indices]: writing a few rows should not cost a copy of a whole cache."""
        if not self.owns(tensor):
            kept = [None if index is None else index.clone() for index in indices]
            rows = torch.ops.aten.index.Tensor(tensor, kept)
            put = torch.ops.aten.index_put_.default
            self.undo.append(partial(put, weak_view(tensor), kept, rows))

    def end_capture(self) -> None:
        """Put back what was written, and poison the results: as if nothing had run."""
        with torch.inference_mode():
            for undo in reversed(self.undo):
                undo()
        self.undo.clear()
        self.saved.clear()
        self.poison()

    def poison(self) -> None:
        with torch.inference_mode():
            for result in self.results.values():
                result.flat.fill_(float("nan") if result.flat.is_floating_point() else -1)

    def pinned_bytes(self) -> int:
        held = [storage for storage, _ in self.results.values()]
        return sum(s.nbytes() for s in held if torch._C._storage_Use_Count(s._cdata) > 1)
