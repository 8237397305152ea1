"""Weak views; they need torch._C._construct_storage_from_data_pointer, which torch may remove."""

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphs.weak import map_tensors, plain_view, tensors_in, weak_view, weak_views


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_torch_still_has_the_private_call():
    assert hasattr(torch._C, "_construct_storage_from_data_pointer")


def test_a_weak_view_is_the_same_memory_shape_and_strides(device):
    base = torch.arange(24.0, device=device).view(4, 6)
    for tensor in (base, base.t(), base[1:3, ::2], base[:0], torch.ones((), device=device)):
        view = weak_view(tensor)
        assert view.data_ptr() == tensor.data_ptr()
        assert (view.shape, view.stride(), view.device) == (
            tensor.shape,
            tensor.stride(),
            tensor.device,
        )
        assert torch.equal(view, tensor)


def test_a_write_through_a_weak_view_is_seen(device):
    tensor = torch.zeros(3, device=device)
    weak_view(tensor)[1] = 5
    assert tensor.tolist() == [0, 5, 0]


def test_a_weak_view_keeps_nothing_alive(device):
    tensor = torch.zeros(3, device=device)
    watch = StorageWeakRef(tensor.untyped_storage())
    view = weak_view(tensor)
    del tensor
    assert watch.expired()
    del view


def test_a_plain_view_keeps_its_memory_and_has_no_base():
    with torch.inference_mode(False):
        part = torch.zeros(6)[2:4]
        view = plain_view(part)
    watch = StorageWeakRef(part.untyped_storage())
    del part
    assert not watch.expired()
    assert view._base is None


def test_containers_are_rebuilt_and_everything_else_is_passed_on():
    marker = object()
    value = {"a": [torch.ones(1), (torch.zeros(1), marker)], "b": Pair(torch.ones(1), 3)}
    weak = weak_views(value)
    assert weak["a"][1][1] is marker
    assert isinstance(weak["b"], Pair)
    assert [t.data_ptr() for t in tensors_in(weak)] == [t.data_ptr() for t in tensors_in(value)]
    assert all(new is not old for new, old in zip(tensors_in(weak), tensors_in(value), strict=True))
    assert map_tensors(lambda t: t, 7) == 7
