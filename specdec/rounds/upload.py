"""Copies of host numbers to the device, without waiting for it.

Their source is pinned memory that is reused, so no copy asks an allocator.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

STAGED_BYTES = 1 << 20  # of each half; a step needs a few kilobytes
ALIGNMENT = 16


def upload(buffer: Tensor, values: np.ndarray | Tensor) -> None:
    """Write `values`, which lie on the host, to the first rows of `buffer`."""
    buffer[: len(values)].copy_(_staged(values, buffer.device), non_blocking=True)


def upload_all(pairs: Sequence[tuple[Tensor, np.ndarray]]) -> None:
    """Write integers to several int64 buffers, as `upload` does, in one copy."""
    device = pairs[0][0].device
    staged = uploaded(np.concatenate([values for _, values in pairs]), device)
    sizes = [len(values) for _, values in pairs]
    places = [buffer[:size] for (buffer, _), size in zip(pairs, sizes, strict=True)]
    torch._foreach_copy_(places, torch.split(staged, sizes))


def uploaded(values: np.ndarray, device: torch.device) -> Tensor:
    return _staged(values, device).to(device, non_blocking=True)


class Staging:
    """Pinned memory in two halves that take turns.

    A half is written again only after the copies from it are over, on all streams that they ran on.
    halves: of bytes
    """

    def __init__(self, device: torch.device, halves: tuple[Tensor, Tensor]) -> None:
        self._device = device
        self._halves = halves
        self._copied: list[list[Any]] = [[], []]  # events after the last copies from each half
        self._streams: dict[Any, None] = {}  # that copy from this half
        self._half = 0
        self._at = 0

    @staticmethod
    def of(device: torch.device) -> "Staging":
        """Allocate the staging memory of a device."""
        one, other = (torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab")
        return Staging(device, (one, other))

    def put(self, values: Tensor) -> Tensor:
        """Write the values to pinned memory, for a copy launched next on the current stream."""
        if values.nbytes > len(self._halves[0]):
            return values.pin_memory()
        if self._at + values.nbytes > len(self._halves[0]):
            self._turn()
        place = self._halves[self._half][self._at : self._at + values.nbytes]
        self._at += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        self._streams[torch.cuda.current_stream(self._device)] = None
        place = place.view(values.dtype).view(values.shape)
        # not by torch, which wakes other threads for 32,768 numbers: that can take milliseconds
        np.copyto(place.numpy(), values.numpy())
        return place

    def _turn(self) -> None:
        """Switch to the other half, once nothing is copied from it any more."""
        self._copied[self._half] = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        self._half = 1 - self._half
        self._at = 0
        for event in self._copied[self._half]:
            event.synchronize()


class OfThread(threading.local):
    """The staging memory of a thread, since a step's copies come from one thread."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Staging] = {}


_of_thread = OfThread()


def _staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return what a copy to the device may read from.

    The driver stages copies of pageable memory, and may wait for the stream to do so.
    """
    host = torch.as_tensor(values)
    if device.type != "cuda":
        return host
    known = _of_thread.by_device
    if device not in known:
        known[device] = Staging.of(device)
    return known[device].put(host)
