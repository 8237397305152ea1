"""Weak views: tensors that know an address and a shape but keep no memory alive.

A strong reference to a tensor of a capture pins its memory in the pool, once for each size. A weak
view does not; the graph or the static buffer that owns the memory must outlive it.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor

V = TypeVar("V")


def weak_view(tensor: Tensor) -> Tensor:
    """A plain tensor over the same memory that does not own it; no autograd, no subclass."""
    storage = tensor.untyped_storage()
    # a private call: see test_weak.py
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return _over(cast(torch.UntypedStorage, alias), tensor)


def plain_view(tensor: Tensor) -> Tensor:
    """View and keep the memory in a tensor without a base for torch.compile to put guards on."""
    return _over(tensor.untyped_storage(), tensor)


def _over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a view that may be written in any mode
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def weak_views(value: V) -> V:
    return map_tensors(weak_view, value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: V) -> V:
    """`value` with fn(tensor) for each tensor, in nested lists, tuples, named tuples and dicts."""
    mapped: object = value
    if isinstance(value, Tensor):
        mapped = fn(value)
    elif isinstance(value, dict):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
    elif isinstance(value, list):
        mapped = [map_tensors(fn, item) for item in value]
    elif isinstance(value, tuple):
        rebuild = getattr(value, "_make", tuple)  # a named tuple keeps its type
        mapped = rebuild(map_tensors(fn, item) for item in value)
    return cast(V, mapped)


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that `map_tensors` would visit, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
