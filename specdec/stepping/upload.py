"""Host numbers to the device, without waiting for it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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
    """A new tensor on the device."""
    return _staged(values, device).to(device, non_blocking=True)


def _staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    host = torch.as_tensor(values)
    # the copy of pageable memory is staged by the driver, which may wait for the stream
    return host.pin_memory() if device.type == "cuda" else host
