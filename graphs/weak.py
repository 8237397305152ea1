"""Weak views: tensors that know an address and a shape but keep no memory alive.

A strong reference to a tensor made during a capture pins its memory in the pool: one copy of the activations for each
captured size. A weak view does not; whoever holds one promises that the graph, or the static buffer, outlives it.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor


def weak_view(tensor: Tensor) -> Tensor:
    """A plain tensor over the same memory that does not own it; no autograd, no subclass.

    It needs torch._C._construct_storage_from_data_pointer, a private call; tests/graphs/test_weak.py watches it.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return _over(cast(torch.UntypedStorage, alias), tensor)


def plain_view(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that owns it, but is nobody's view: torch.compile puts no guard on a base."""
    return _over(tensor.untyped_storage(), tensor)


def _over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):  # a view that may be written in any mode
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def weak_views(value: object) -> object:
    """`value` with each tensor replaced by a weak view: lists, tuples, named tuples and dicts, nested as they come."""
    return map_tensors(weak_view, value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: object) -> object:
    """Rebuild the containers of `value` around fn(tensor); everything else is passed on as it is."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_tensors(fn, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(fn, item) for item in value]
    if isinstance(value, tuple):
        rebuild = getattr(value, "_make", tuple)  # a named tuple keeps its type
        return rebuild(map_tensors(fn, item) for item in value)
    return value


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that `map_tensors` would visit, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
